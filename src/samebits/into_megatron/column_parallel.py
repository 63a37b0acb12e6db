"""A linear layer whose output columns are split over ranks, with one rounding of its input's gradient.

Forward, every rank has all of K and nothing is summed across ranks. Backward, each rank's columns give a part of
the input's gradient: the parts stay fp32, meet in the contract's tree over ranks, and are rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from samebits.collectives import all_gather_rows, tree_all_reduce, tree_reduce_scatter
from samebits.ops.gradients import deliver_weight_gradient, weight_gradient_buffer
from samebits.ops.linear import dgrad, linear, wgrad


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup, split_rows: bool
    ) -> Tensor:
        full = all_gather_rows(x, group) if split_rows else x
        ctx.save_for_backward(full, weight, bias)
        ctx.group, ctx.split_rows = group, split_rows
        return linear(full, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        full, weight, bias = ctx.saved_tensors
        leave = tree_reduce_scatter if ctx.split_rows else tree_all_reduce
        dx = leave(dgrad(dy, weight, torch.float32), ctx.group).to(full.dtype)
        dw = db = None
        if ctx.needs_input_grad[1]:
            buffer = weight_gradient_buffer(weight)
            wgrad(dy, full, buffer)
            dw = deliver_weight_gradient(weight, buffer)
        if bias is not None and ctx.needs_input_grad[2]:
            buffer = weight_gradient_buffer(bias)
            # A bias is a weight whose input is always one.
            wgrad(dy, full.new_ones((*full.shape[:-1], 1)), buffer.view(-1, 1))
            db = deliver_weight_gradient(bias, buffer)
        return dx, dw, db, None, None


def column_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup, split_rows: bool
) -> Tensor:
    """[..., N_local] bf16 from x [..., K] and this rank's weight [N_local, K].

    With `split_rows` (sequence parallelism) x holds this rank's rows only, and all rows come out.
    """
    if group.size() == 1:
        return linear(x, weight, bias)
    return _ColumnParallel.apply(x, weight, bias, group, split_rows)
