"""Weight gradients whose bits no layout can change: every sum over tokens in order of sample and position.

A rank that holds only some of the tokens gathers the others' and computes a share of the weight's rows, so each
element of a gradient is one chain on one rank, and adding the ranks adds zeros to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from samebits.collectives import all_gather_rows, fold_neighbours, gather_states, tree_all_reduce, tree_reduce_scatter
from samebits.into_megatron.layout import Packing
from samebits.ops.attention import attention
from samebits.ops.embedding import embedding
from samebits.ops.gradients import deliver_weight_gradient, weight_gradient_buffer
from samebits.ops.linear import dgrad, linear, linear_partial, wgrad
from samebits.ops.rms_norm import rms_norm


@dataclass
class GradientOrder:
    """What the layers of one model chunk must know. `packing` is that of the micro-batch in its forward pass.

    The sum over output columns that an input gradient is, is cut into `parts` over all tensor-parallel ranks.
    `table` is the gradient of the embedding where the output layer has the same weight: the two are added last.
    """

    parts: int
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    packing: Packing | None = None
    table: Tensor | None = None

    def __deepcopy__(self, memo: Any) -> GradientOrder:
        # Megatron copies its configuration for attention with few heads; process groups cannot be copied.
        return self

    @property
    def own_parts(self) -> int:
        return self.parts // self.tp.size()

    def rows(self) -> TokenRows:
        """How the rows of the micro-batch in its forward pass lie over ranks."""
        assert self.packing is not None
        return TokenRows(self.cp, self.packing.key_order)


@dataclass(frozen=True)
class TokenRows:
    """Rows of one micro-batch over context-parallel ranks; `order` puts gathered rows in order (None: one rank)."""

    cp: dist.ProcessGroup
    order: Tensor | None

    def everyones(self, own: Tensor) -> Tensor:
        """All ranks' rows in order of sample and position, from this rank's."""
        return own if self.order is None else all_gather_rows(own, self.cp)[self.order]

    def own(self, everyones: Tensor) -> Tensor:
        """This rank's rows out of all in order."""
        if self.order is None:
            return everyones
        place = torch.empty_like(self.order)
        place[self.order] = torch.arange(len(self.order), device=place.device)
        return everyones[place.chunk(self.cp.size())[self.cp.rank()]]

    def share(self, count: int) -> slice:
        """Which of `count` rows of a weight this rank computes the gradient of."""
        size, rank = self.cp.size(), self.cp.rank()
        return slice(count * rank // size, count * (rank + 1) // size)


def _add_weight_gradient(weight: Tensor, dy: Tensor, x: Tensor, rows: TokenRows) -> Tensor | None:
    """Continue `weight`'s chains over all tokens of the micro-batch; dy [T, N] and x [T, K] are this rank's rows."""
    buffer, mine = weight_gradient_buffer(weight), rows.share(weight.shape[0])
    target = buffer.view(weight.shape[0], -1)
    wgrad(rows.everyones(dy)[:, mine], rows.everyones(x), target[mine])
    return deliver_weight_gradient(weight, buffer)


def _input_gradient(dy: Tensor, weight: Tensor, parts: int, halves: int) -> Tensor:
    """fp32 dy @ weight, cut into `parts` along the output columns and added along a tree.

    `halves` is 2 for [gate | up], of which every rank, hence every part, holds an equal share of each.
    """
    columns = weight.shape[0] // (halves * parts)
    by_part = dy.reshape(-1, halves, parts, columns), weight.reshape(halves, parts, columns, -1)
    sums = [
        dgrad(
            by_part[0][:, :, part].reshape(len(by_part[0]), -1),
            by_part[1][:, part].reshape(halves * columns, -1),
            torch.float32,
        )
        for part in range(parts)
    ]
    return fold_neighbours(sums)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, order: GradientOrder, split_rows: bool, halves: int
    ) -> Tensor:
        full = all_gather_rows(x, order.tp) if split_rows else x
        ctx.save_for_backward(full, weight, bias)
        ctx.order, ctx.rows, ctx.split_rows, ctx.halves = order, order.rows(), split_rows, halves
        return linear(full, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        full, weight, bias = ctx.saved_tensors
        flat, inputs = dy.reshape(-1, dy.shape[-1]), full.reshape(-1, full.shape[-1])
        leave = tree_reduce_scatter if ctx.split_rows else tree_all_reduce
        dx = _input_gradient(flat, weight, ctx.order.own_parts, ctx.halves).view(full.shape)
        dx = leave(dx, ctx.order.tp).to(full.dtype)
        dw = db = None
        if ctx.needs_input_grad[1]:
            dw = _add_weight_gradient(weight, flat, inputs, ctx.rows)
        if bias is not None and ctx.needs_input_grad[2]:
            # A bias is a weight whose input is always one.
            db = _add_weight_gradient(bias, flat, inputs.new_ones(len(inputs), 1), ctx.rows)
        return dx, dw, db, None, None, None


def ordered_columns(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: GradientOrder, split_rows: bool, halves: int
) -> Tensor:
    """`column_parallel` with gradients in order; `halves` is 2 where the columns are [gate | up]."""
    return _Columns.apply(x, weight, bias, order, split_rows, halves)


class _Partial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, segments: int, rows: TokenRows) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        return linear_partial(x, weight, segments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grad.to(torch.bfloat16).reshape(-1, grad.shape[-1])
        dx = dgrad(dy, weight).view(x.shape)
        dw = _add_weight_gradient(weight, dy, x.reshape(-1, x.shape[-1]), ctx.rows) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


def ordered_partial(x: Tensor, weight: Tensor, segments: int, order: GradientOrder) -> Tensor:
    """`linear_partial` with a weight gradient in order."""
    return _Partial.apply(x, weight, segments, order.rows())


def _norm_gradients(dy: Tensor, x: Tensor, weight: Tensor, eps: float, buffer: Tensor) -> Tensor:
    """dx of RMSNorm; `buffer`, fp32 like `weight`, continues the weight's chains."""
    leaf, stand_in = x.detach().requires_grad_(), weight.detach().requires_grad_()
    stand_in.main_grad = buffer  # type: ignore[attr-defined]
    with torch.enable_grad():
        (dx,) = torch.autograd.grad(rms_norm(leaf, stand_in, eps), leaf, dy)
    return dx


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, order: GradientOrder, split_rows: bool, sharers: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.tp, ctx.rows, ctx.split_rows, ctx.sharers = eps, order.tp, order.rows(), split_rows, sharers
        return rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        buffer = weight_gradient_buffer(weight)
        if not (ctx.split_rows or ctx.sharers) and ctx.rows.order is None:
            dx = _norm_gradients(dy, x, weight, ctx.eps, buffer)
            return dx, deliver_weight_gradient(weight, buffer), None, None, None, None
        dx = _norm_gradients(dy, x, weight, ctx.eps, torch.zeros_like(buffer))
        dy, x = _every_row(dy, ctx), _every_row(x, ctx)
        # Where ranks hold parts, one of them adds up all: Megatron then sums the others' zeros.
        first = ctx.rows.cp.rank() == 0 and (ctx.tp.rank() == 0 or not (ctx.split_rows or ctx.sharers))
        if first and ctx.needs_input_grad[1]:
            _norm_gradients(dy, x, weight, ctx.eps, buffer)
        return dx, deliver_weight_gradient(weight, buffer), None, None, None, None


def _every_row(own: Tensor, ctx: Any) -> Tensor:
    """[rows, width] of all ranks in order of sample and position, and of heads where the ranks hold some each."""
    if ctx.sharers:
        heads = gather_states(own, ctx.tp)[:: ctx.sharers]
        own = heads.movedim(0, 1).reshape(own.shape[0], -1, own.shape[-1])
    elif ctx.split_rows:
        own = all_gather_rows(own, ctx.tp)
    return ctx.rows.everyones(own).reshape(-1, own.shape[-1])


def ordered_norm(
    x: Tensor, weight: Tensor, eps: float, order: GradientOrder, split_rows: bool, sharers: int = 0
) -> Tensor:
    """RMSNorm of x [T, ..., W] whose weight sees its rows in order on one rank.

    Of a QK-norm, `sharers` tensor-parallel ranks hold the same heads, and different ones otherwise; 0 is no QK-norm.
    """
    return _Norm.apply(x, weight, eps, order, split_rows, sharers)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, start: int, rows: TokenRows, table: Tensor | None) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.start, ctx.rows, ctx.table = start, rows, table
        return embedding(ids, weight, start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ids, weight = ctx.saved_tensors
        buffer = weight_gradient_buffer(weight) if ctx.table is None else ctx.table
        mine = ctx.rows.share(weight.shape[0])
        stand_in = weight.detach()[mine].requires_grad_()
        stand_in.main_grad = buffer[mine]
        with torch.enable_grad():
            rows = embedding(ctx.rows.everyones(ids), stand_in, ctx.start + mine.start)
        torch.autograd.grad(rows, stand_in, ctx.rows.everyones(dy))
        return None, deliver_weight_gradient(weight, buffer), None, None, None


def ordered_embedding(ids: Tensor, weight: Tensor, start: int, order: GradientOrder) -> Tensor:
    """Rows of the table for ids [T], with the table's gradient in order."""
    return _Embedding.apply(ids, weight, start, order.rows(), order.table)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, packing: Packing, rows: TokenRows
    ) -> Tensor:
        key, value = rows.everyones(key), rows.everyones(value)
        ctx.save_for_backward(query, key, value)
        ctx.scale, ctx.packing, ctx.rows = scale, packing, rows
        return attention(
            query, key, value, packing.keys, scale, q_positions=packing.positions, cu_seqlens_q=packing.queries
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        rows, groups = ctx.rows, key.shape[1]
        # A key's chain runs over the queries of all ranks, so heads are shared out instead of rows, if they divide.
        shared = groups % rows.cp.size() == 0
        mine = rows.share(groups) if shared else slice(0, groups)
        each = query.shape[1] // groups
        queries = slice(mine.start * each, mine.stop * each)
        q, k, v = (
            part.contiguous().requires_grad_()
            for part in (rows.everyones(query)[:, queries], key[:, mine], value[:, mine])
        )
        with torch.enable_grad():
            out = attention(q, k, v, ctx.packing.keys, ctx.scale)
        gradients = torch.autograd.grad(out, (q, k, v), rows.everyones(dout)[:, queries].contiguous())
        if shared:
            gradients = tuple(torch.cat(list(gather_states(g, rows.cp)), dim=1) for g in gradients)
        return *(rows.own(g) for g in gradients), None, None, None


def ordered_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, packing: Packing, order: GradientOrder
) -> Tensor:
    """Attention of this context-parallel rank's queries over the keys of all; key gradients in order of query."""
    return _Attention.apply(query, key, value, scale, packing, order.rows())
