"""The row view of a tensor, which row-wise kernels work on."""

from __future__ import annotations

import torch


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., W] as [rows, W] with unit inner stride; copies only where the layout asks for it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
