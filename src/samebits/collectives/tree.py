"""Adding across ranks: the last levels of the contract's tree, in fp32, over neighbouring ranks.

A rank's partial sum is the value of a subtree over its own run of K segments. The ranks then combine in pairs
(0+1, 2+3, ...), the pairs in pairs, and so on, which is the order one rank alone would have used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.collectives.fold import finish
from samebits.collectives.groups import group_size, require_power_of_two
from samebits.collectives.moves import all_gather_rows
from samebits.collectives.transport import transport_of


def _tree_sum(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    _check(partial, group, "tree_all_reduce")
    return transport_of(group).tree_sum(partial.contiguous())


def _tree_sum_rows(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of the tree sum; a rank needs of every other one only the rows that it will keep."""
    ranks = _check(partial, group, "tree_reduce_scatter")
    if partial.shape[0] % ranks:
        raise ValueError(
            f"tree_reduce_scatter: {partial.shape[0]} rows do not split over {ranks} ranks; "
            f"pad them to a multiple of {ranks}"
        )
    shares = partial.contiguous().view(ranks, -1)
    return transport_of(group).tree_share(shares).view(-1, *partial.shape[1:])


def _check(partial: Tensor, group: dist.ProcessGroup, what: str) -> int:
    """The number of ranks. Raises ValueError for one that no tree has, and for sums that were rounded already."""
    require_power_of_two(group.size(), what)
    if partial.dtype != torch.float32:
        raise ValueError(f"{what}: partial sums must be float32, got {partial.dtype}")
    return group.size()


class _TreeAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _tree_sum(partial.detach(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].contiguous(), None


def tree_all_reduce(partial: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Tree sum over ranks of fp32 partial sums, the same bits on every rank; not rounded.

    The gradient passes through: what follows is computed alike on all ranks.
    """
    if group is None or group.size() == 1:
        return partial
    if partial.requires_grad and torch.is_grad_enabled():
        return _TreeAllReduce.apply(partial, group)
    return _tree_sum(partial, group)  # a third of the host's time


def tree_all_reduce_bf16(partial: Tensor, group: dist.ProcessGroup | None, bias: Tensor | None = None) -> Tensor:
    """`tree_all_reduce` of fp32 [..., N], plus `bias` (bf16 [N]), rounded once to bf16; no gradient.

    On GPUs one kernel does all of it, and what the ranks send each other last is rounded already.
    """
    own = partial.detach().contiguous()
    if group is None or group.size() == 1:
        return finish(own, bias, torch.bfloat16)
    _check(own, group, "tree_all_reduce_bf16")
    return transport_of(group).tree_sum_bf16(own, bias)


class _TreeReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _tree_sum_rows(partial.detach(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather_rows(grads[0], ctx.group), None


def tree_reduce_scatter(partial: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's rows of the tree sum over ranks: the bits of `tree_all_reduce`, cut; the gradient is gathered.

    Raises ValueError when the rows do not divide over the ranks.
    """
    if group_size(group) == 1:
        return partial
    return _TreeReduceScatter.apply(partial, group)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _tree_sum(grads[0].float(), ctx.group).to(grads[0].dtype), None


def copy_to_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`x` itself, entering a region where every rank uses it for other columns: gradients are tree-summed in fp32."""
    if group_size(group) == 1:
        return x
    return _CopyToGroup.apply(x, group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_rows(own, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _tree_sum_rows(grads[0].float(), ctx.group).to(grads[0].dtype), None


def gather_rows(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Rows of all ranks in rank order, for ranks that each use all of them: gradients are tree-summed and cut."""
    if group_size(group) == 1:
        return own
    return _GatherRows.apply(own, group)
