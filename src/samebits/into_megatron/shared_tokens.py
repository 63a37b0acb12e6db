"""Moves between ranks whose gradients are complete on every rank: nothing is added on the way back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.collectives import gather_states
from samebits.into_megatron.order import TokenRows


class _EveryRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: TokenRows) -> Tensor:
        ctx.rows = rows
        return rows.everyones(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.own(grads[0]), None


def every_row(own: Tensor, rows: TokenRows) -> Tensor:
    """All context-parallel ranks' rows in order, for ranks that each compute the same from them."""
    return _EveryRow.apply(own, rows)


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, everyones: Tensor, rows: TokenRows) -> Tensor:
        ctx.rows = rows
        return rows.own(everyones)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.everyones(grads[0].contiguous()), None


def own_rows_of(everyones: Tensor, rows: TokenRows) -> Tensor:
    """This rank's rows of what all ranks computed alike; each rank's gradient reaches all."""
    return _OwnRows.apply(everyones, rows)


class _GroupColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup, sharers: int) -> Tensor:
        ctx.place, ctx.sharers = group.rank() % sharers, sharers
        first = group.rank() - ctx.place
        return torch.cat(list(gather_states(own, group)[first : first + sharers]), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].chunk(ctx.sharers, dim=-1)[ctx.place].contiguous(), None, None


def group_columns(own: Tensor, group: dist.ProcessGroup, sharers: int) -> Tensor:
    """The columns [T, sharers * n] of `sharers` neighbouring ranks, for ranks that each compute the same from them."""
    return _GroupColumns.apply(own, group, sharers)


class _OwnHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, group: dist.ProcessGroup, sharers: int) -> Tensor:
        ctx.group, ctx.sharers = group, sharers
        return heads.chunk(sharers, dim=1)[group.rank() % sharers].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        first = ctx.group.rank() - ctx.group.rank() % ctx.sharers
        everyones = gather_states(grads[0], ctx.group)[first : first + ctx.sharers]
        return torch.cat(list(everyones), dim=1), None, None


def own_heads(heads: Tensor, group: dist.ProcessGroup, sharers: int) -> Tensor:
    """This rank's part of the heads [T, heads, D] that `sharers` neighbouring ranks computed alike."""
    return _OwnHeads.apply(heads, group, sharers)
