"""Moving bits between ranks: no function here computes, so none can change a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.collectives.groups import group_rank, group_size
from samebits.collectives.transport import transport_of


def gather_states(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Stack every rank's tensor of one shape, in rank order: [ranks, *own.shape]; any dtype; no gradient."""
    own = own.detach().contiguous()
    if group is None or group.size() == 1:
        return own.unsqueeze(0)
    # As bytes: every transport carries bytes, and none has an opinion about them.
    stacked = transport_of(group).gather(own.reshape(-1).view(torch.uint8))
    return stacked.view(-1).view(own.dtype).view(group.size(), *own.shape)


def all_gather_rows(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Concatenate every rank's rows in rank order: [ranks * rows, ...]; any dtype; no gradient."""
    stacked = gather_states(own, group)
    return stacked.reshape(stacked.shape[0] * stacked.shape[1], *stacked.shape[2:])


def own_rows(full: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's equal share of the rows of `full`, contiguous.

    Raises ValueError when the rows do not divide evenly.
    """
    ranks = group_size(group)
    if full.shape[0] % ranks:
        raise ValueError(
            f"own_rows: {full.shape[0]} rows do not split over {ranks} ranks; pad them to a multiple of {ranks}"
        )
    rows = full.shape[0] // ranks
    start = group_rank(group) * rows
    return full[start : start + rows].contiguous()


def gather_ragged(own: Tensor, lengths: Sequence[int], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Every rank's rows, where rank r holds `lengths[r]` of them; one tensor per rank; no gradient.

    Raises ValueError when this rank's row count is not the announced one.
    """
    if own.shape[0] != lengths[group_rank(group)]:
        raise ValueError(f"gather_ragged: {own.shape[0]} rows here, {lengths[group_rank(group)]} were announced")
    padded = own.new_zeros((max(lengths), *own.shape[1:]))
    padded[: own.shape[0]] = own.detach()
    return [rows[:length] for rows, length in zip(gather_states(padded, group), lengths, strict=True)]


class _SelectOwner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, owner: Tensor, group: dist.ProcessGroup) -> Tensor:
        rows = own.shape[0]
        return all_gather_rows(own, group)[owner * rows + torch.arange(rows, device=own.device)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # The op that made `own` gives no gradient to rows it does not own, so no mask is needed here.
        return grads[0].contiguous(), None, None


def select_owner(own: Tensor, owner: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Row i of the result is row i of rank `owner[i]`'s tensor, bit for bit.

    `own` is [rows, ...] on every rank, `owner` int64 [rows] and equal on every rank. The gradient flows back
    unchanged to each rank's own tensor, whose producer must ignore the rows it does not own.
    """
    if group_size(group) == 1:
        return own
    return _SelectOwner.apply(own, owner, group)


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return own_rows(full, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather_rows(grads[0], ctx.group), None


def scatter_rows(full: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Keep this rank's share of the rows of a tensor that all ranks hold; the gradient is gathered again."""
    if group_size(group) == 1:
        return full
    return _ScatterRows.apply(full, group)
