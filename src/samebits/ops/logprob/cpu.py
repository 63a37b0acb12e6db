"""The C++ kernels, called by address."""

from __future__ import annotations

import torch

from samebits import _cpu
from samebits.backends import serve_only
from samebits.ops.logprob.rows import Temperature


def as_arguments(temperature: Temperature) -> tuple[int, float]:
    """(address of one temperature per row or 0, the temperature of all rows)."""
    return (temperature.data_ptr(), 1.0) if isinstance(temperature, torch.Tensor) else (0, temperature)


def state(logits: torch.Tensor, temperature: Temperature) -> torch.Tensor:
    rows, columns = logits.shape
    out = logits.new_empty(rows, 5, dtype=torch.int64)
    temperatures = as_arguments(temperature)
    _cpu.lse_states(logits.data_ptr(), logits.stride(0), rows, columns, *temperatures, out.data_ptr())
    return out


def lse(states: torch.Tensor) -> torch.Tensor:
    out = states.new_empty(states.shape[0], dtype=torch.float32)
    _cpu.lse_finish(states.data_ptr(), out.data_ptr(), out.shape[0])
    return out


def finish(states: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(z)
    _cpu.logp_finish(states.data_ptr(), z.data_ptr(), out.data_ptr(), *z.shape)
    return out


def logprob(logits: torch.Tensor, targets: torch.Tensor, temperature: Temperature) -> torch.Tensor:
    out = logits.new_empty(targets.shape)
    rows, columns = logits.shape
    temperatures = as_arguments(temperature)
    _cpu.logprob(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        columns,
        targets.data_ptr(),
        targets.shape[1],
        *temperatures,
        out.data_ptr(),
    )
    return out


def linear_state(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: Temperature,
    arithmetic: str,
) -> torch.Tensor:
    serve_only("linear_logp", "cpu", arithmetic, "fma32")
    rows, depth = hidden.shape
    out = hidden.new_empty(rows, 6, dtype=torch.int64)
    _cpu.head_states(
        hidden.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        targets.data_ptr(),
        *as_arguments(temperature),
        out.data_ptr(),
        rows,
        weight.shape[0],
        depth,
    )
    return out


def linear_backward(
    upstream: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: Temperature,
    lse: torch.Tensor,
    dw: torch.Tensor | None,
    dbias: torch.Tensor | None,
    arithmetic: str,
) -> torch.Tensor:
    serve_only("linear_logp", "cpu", arithmetic, "fma32")
    rows, depth = hidden.shape
    dhidden = hidden.new_empty(rows, depth, dtype=torch.float32)
    _cpu.head_gradients(
        upstream.data_ptr(),
        hidden.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        targets.data_ptr(),
        *as_arguments(temperature),
        lse.data_ptr(),
        dhidden.data_ptr(),
        0 if dw is None else dw.data_ptr(),
        0 if dbias is None else dbias.data_ptr(),
        rows,
        weight.shape[0],
        depth,
    )
    return dhidden
