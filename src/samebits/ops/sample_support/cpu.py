"""The C++ kernels, called by address."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits import _cpu
from samebits.backends import serve_only
from samebits.ops.logprob.cpu import as_arguments
from samebits.ops.logprob.rows import Temperature
from samebits.ops.sample_support.rows import Kept, Limits


def support(logits: Tensor, temperature: Temperature, limits: Limits) -> Kept:
    rows = (logits.data_ptr(), logits.stride(0), *logits.shape, *as_arguments(temperature))
    counts, cuts = (logits.new_empty(len(logits), dtype=torch.int64) for _ in range(2))
    bounds = (limits.top_k.data_ptr(), limits.top_p.data_ptr(), limits.min_p.data_ptr())
    _cpu.support_cuts(*rows, *bounds, counts.data_ptr(), cuts.data_ptr())
    room = Kept(counts.clamp_min(0), counts.new_empty(int(counts.clamp_min(0).sum())))
    _cpu.support_ids(*rows, room.offsets.data_ptr(), cuts.data_ptr(), room.ids.data_ptr())
    return Kept(counts, room.ids)


def sample_kept(
    logits: Tensor, temperature: Temperature, seeds: Tensor, positions: Tensor, kept: Kept
) -> tuple[Tensor, Tensor]:
    rows = len(logits)
    tokens = seeds.new_empty(rows)
    logp = logits.new_empty(rows)
    _cpu.sample_kept(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        *as_arguments(temperature),
        seeds.data_ptr(),
        positions.data_ptr(),
        kept.offsets.data_ptr(),
        kept.ids.data_ptr(),
        tokens.data_ptr(),
        logp.data_ptr(),
    )
    return tokens, logp


def kept_logprob(logits: Tensor, targets: Tensor, temperature: Temperature, kept: Kept) -> Tensor:
    out = logits.new_empty(targets.shape)
    _cpu.kept_logprob(
        logits.data_ptr(),
        logits.stride(0),
        len(logits),
        targets.data_ptr(),
        targets.shape[1],
        *as_arguments(temperature),
        kept.offsets.data_ptr(),
        kept.ids.data_ptr(),
        out.data_ptr(),
    )
    return out


def kept_state(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Temperature,
    kept: Kept,
    arithmetic: str,
) -> Tensor:
    serve_only("kept_linear_logp", "cpu", arithmetic, "fma32")
    out = hidden.new_empty(len(hidden), 6, dtype=torch.int64)
    _cpu.kept_states(
        hidden.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        targets.data_ptr(),
        *as_arguments(temperature),
        kept.offsets.data_ptr(),
        kept.ids.data_ptr(),
        out.data_ptr(),
        *hidden.shape,
    )
    return out


def kept_backward(
    upstream: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Temperature,
    kept: Kept,
    lse: Tensor,
    dw: Tensor | None,
    dbias: Tensor | None,
    arithmetic: str,
) -> Tensor:
    serve_only("kept_linear_logp", "cpu", arithmetic, "fma32")
    dhidden = hidden.new_empty(hidden.shape, dtype=torch.float32)
    _cpu.kept_gradients(
        upstream.data_ptr(),
        hidden.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        targets.data_ptr(),
        *as_arguments(temperature),
        lse.data_ptr(),
        kept.offsets.data_ptr(),
        kept.ids.data_ptr(),
        dhidden.data_ptr(),
        0 if dw is None else dw.data_ptr(),
        0 if dbias is None else dbias.data_ptr(),
        *hidden.shape,
    )
    return dhidden
