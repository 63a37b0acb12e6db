"""Entropy of softmax((hidden @ weight^T + bias) / temperature) in tiles of the vocabulary.

A term p (lse - z) lies in [0, 1/e], and the sum below log V: as integers in units of 2^-40 the terms add up to the
same sum however the vocabulary is tiled or split over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from samebits.arithmetic.compiled import exp2
from samebits.arithmetic.primitives import LOG2_E
from samebits.collectives import gather_states
from samebits.linear_logp.types import LinearLogpContext, Temperature
from samebits.ops.gradients import deliver_weight_gradient, weight_gradient_buffer
from samebits.ops.linear import dgrad, matmul_f32, wgrad
from samebits.ops.logprob import finish, lse_state, merge_states

_TILE = 1024
# a tile's rows: bounds memory; every sum over columns or rows is the same with any other multiple of 16
_ROWS = {"cpu": 128, "cuda": 4096}
_UNIT = float(1 << 40)


def linear_entropy(
    context: LinearLogpContext, hidden: Tensor, temperature: Temperature, group: dist.ProcessGroup | None
) -> Tensor:
    """fp32 [n] for hidden [n, H], which holds bf16 values; the same on all ranks of `group`. NaN for a row whose
    log-sum-exp is not finite. Each rank's hidden gradient is the part that its columns give."""
    part = context.vocab_partition
    columns = max(0, min(part.local_size, part.real_size - part.local_start))
    projection = context.projection
    value: Tensor = _Entropy.apply(  # type: ignore[no-untyped-call]
        hidden, projection.weight, projection.bias, _as_column(temperature, hidden), columns, group
    )
    return value


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: Tensor,
        columns: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        rows = hidden.bfloat16()
        lse = _log_sum_exp(rows, weight, bias, temperature, columns, group)
        total = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        for block, _, logits in _tiles(rows, weight, bias, temperature, columns):
            p, depth = _probabilities(logits, lse[block])
            total[block] += (p * depth).double().mul_(_UNIT).round_().to(torch.int64).sum(1)
        entropy = (gather_states(total, group).sum(0).double() / _UNIT).float()
        entropy = torch.where(torch.isfinite(lse), entropy, torch.full_like(entropy, float("nan")))
        ctx.save_for_backward(rows, weight, bias, lse, entropy)
        ctx.temperature, ctx.columns, ctx.hidden_dtype = temperature, columns, hidden.dtype
        return entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, lse, entropy = ctx.saved_tensors
        dw = weight_gradient_buffer(weight) if ctx.needs_input_grad[1] else None
        db = weight_gradient_buffer(bias) if bias is not None and ctx.needs_input_grad[2] else None
        dhidden = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        upstream = grads[0][:, None] / ctx.temperature
        for block, part, logits in _tiles(rows, weight, bias, ctx.temperature, ctx.columns):
            p, depth = _probabilities(logits, lse[block])
            dz = upstream[block] * (p * (depth - entropy[block, None]))
            dhidden[block] += dgrad(dz, weight[part], torch.float32)
            if dw is not None:
                wgrad(dz, rows[block], dw[part])
            if db is not None:
                # a bias is a weight whose input is always one
                wgrad(dz, torch.ones(len(dz), 1, dtype=torch.bfloat16, device=dz.device), db[part].view(-1, 1))
        return (
            dhidden.to(ctx.hidden_dtype),
            None if dw is None else deliver_weight_gradient(weight, dw),
            None if db is None else deliver_weight_gradient(bias, db),
            None,
            None,
            None,
        )


def _log_sum_exp(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    columns: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """fp32 [n] over the whole vocabulary. Tiles hold logits that are already divided."""
    # as if there were one column of no weight: a rank may hold nothing but padding
    state = lse_state(rows.new_full((len(rows), 1), float("-inf"), dtype=torch.float32))
    for block, _, logits in _tiles(rows, weight, bias, temperature, columns):
        state[block] = merge_states([state[block], lse_state(logits)])
    return finish(merge_states(list(gather_states(state, group))))


def _tiles(
    rows: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor, columns: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows, columns and scaled fp32 logits of each tile of this rank's real columns; in a tile of columns the rows
    ascend, so that sums over rows continue one chain."""
    size = _ROWS[rows.device.type]
    for start in range(0, columns, _TILE):
        part = slice(start, min(start + _TILE, columns))
        for first in range(0, len(rows), size):
            block = slice(first, min(first + size, len(rows)))
            logits = matmul_f32(rows[block], weight[part].detach())
            if bias is not None:
                logits += bias[part].detach().float()
            yield block, part, logits.div_(temperature[block])


def _as_column(temperature: Temperature, rows: Tensor) -> Tensor:
    """fp32 [n, 1] for rows [n, H], on their device."""
    if isinstance(temperature, Tensor):
        return temperature[:, None]
    return torch.full((len(rows), 1), temperature, dtype=torch.float32, device=rows.device)


def _probabilities(logits: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """p and lse - z of one tile; both 0 where the column has no weight or the row no log-sum-exp."""
    depth = lse[:, None] - logits
    empty = ~torch.isfinite(depth)
    return exp2(depth * -LOG2_E).masked_fill_(empty, 0.0), depth.masked_fill_(empty, 0.0)
