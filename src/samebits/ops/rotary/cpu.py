"""The C++ kernel, called by address."""

from __future__ import annotations

import torch

from samebits import _cpu


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inverse: bool
) -> torch.Tensor:
    tokens, heads, width = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    positions = positions.long()
    y = x.new_empty(tokens, heads, width)
    _cpu.rotary(
        x.data_ptr(), x.stride(0), x.stride(1), positions.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        y.data_ptr(), tokens, heads, width, cos.shape[0], inverse,
    )  # fmt: skip
    return y
