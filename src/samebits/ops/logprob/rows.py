"""What the functions on rows of logits accept, checked in one place."""

from __future__ import annotations

import torch

from samebits.ops.logprob.contract import MAX_TERMS

Temperature = float | torch.Tensor  # one for all rows, or fp32 [T]

SMALLEST_TEMPERATURE = 2.0**-126  # the smallest normal fp32

# stands for the fp32 bits (as an unsigned number) of a target's logit where this part does not hold it
NO_TARGET = -1


def check_logits(op: str, logits: torch.Tensor) -> None:
    """Raise ValueError unless logits are fp32 [T, V] with adjacent columns, outside autograd."""
    if logits.dtype != torch.float32 or logits.ndim != 2:
        raise ValueError(f"{op}: logits must be float32 [T, V], got {logits.dtype} {list(logits.shape)}")
    if not 1 <= logits.shape[1] <= MAX_TERMS:
        raise ValueError(f"{op}: a call takes 1 to {MAX_TERMS} columns, got {logits.shape[1]}; merge states")
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(f"{op}: the columns of a row must be adjacent, got strides {logits.stride()}")
    if logits.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: no gradient flows from here; use linear_logp, or detach the logits")


def check_temperature(op: str, temperature: Temperature, rows: int, zero: bool = False) -> None:
    """Raise ValueError unless every temperature is positive and finite (or zero, where that means greedy)."""
    if isinstance(temperature, torch.Tensor):
        right_type = temperature.dtype == torch.float32 and temperature.is_contiguous()
        if not right_type or temperature.shape != (rows,):
            raise ValueError(
                f"{op}: a tensor of temperatures must be contiguous float32 [{rows}], "
                f"got {temperature.dtype} {list(temperature.shape)}"
            )
        good = (temperature >= SMALLEST_TEMPERATURE) & (temperature < torch.inf)
        if zero:
            good |= temperature == 0
        if not bool(good.all()):
            row = int((~good).nonzero()[0])
            value = float(temperature[row])
            raise ValueError(f"{op}: temperature must be positive and finite, got {value} in row {row}")
    elif not (SMALLEST_TEMPERATURE <= temperature < 3.4e38 or (zero and temperature == 0)):
        raise ValueError(f"{op}: temperature must be positive and finite, got {temperature}")


def check_ids(op: str, name: str, ids: torch.Tensor, rows: int, axes: tuple[int, ...] = (1,)) -> None:
    """Raise ValueError unless ids are contiguous int64 [rows], or [rows, N] where `axes` has a 2."""
    if ids.dtype != torch.int64 or ids.ndim not in axes or ids.shape[0] != rows or not ids.is_contiguous():
        shape = " or ".join(f"[{rows}]" if number == 1 else f"[{rows}, N]" for number in axes)
        raise ValueError(f"{op}: {name} must be contiguous int64 {shape}, got {ids.dtype} {list(ids.shape)}")


def check_hidden(op: str, hidden: torch.Tensor, width: int) -> None:
    """Raise ValueError unless hidden states [T, width] are bf16, or fp32 that holds bf16 values (or NaN)."""
    if hidden.ndim != 2 or hidden.shape[1] != width:
        raise ValueError(f"{op}: hidden must be [T, {width}], got {list(hidden.shape)}")
    if hidden.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{op}: hidden must be bfloat16 or float32, got {hidden.dtype}")
    if hidden.dtype == torch.float32 and bool(((hidden.bfloat16() != hidden) & ~hidden.isnan()).any()):
        raise ValueError(f"{op}: float32 hidden states must hold bfloat16 values; round them first")


def temperature_at(temperature: Temperature, rows: slice | torch.Tensor) -> Temperature:
    """The temperatures of some rows: a slice, or int64 [n]."""
    return temperature[rows] if isinstance(temperature, torch.Tensor) else temperature
