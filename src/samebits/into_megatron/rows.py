"""Picking rows without arithmetic in either direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = source.shape[0]
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        back = grads[0].new_zeros((ctx.rows, *grads[0].shape[1:]))
        # No index appears twice, so this writes each row once; nothing is summed.
        back[index] = grads[0]
        return back, None


def take_rows(source: Tensor, index: Tensor) -> Tensor:
    """`source[index]` for distinct indices int64 [n]; rows that are not taken get a zero gradient."""
    return _TakeRows.apply(source, index)
