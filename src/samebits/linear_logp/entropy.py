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

from samebits.arithmetic.primitives import LOG2_E, exp2
from samebits.collectives import gather_states
from samebits.linear_logp.types import LinearLogpContext, Temperature
from samebits.ops.gradients import deliver_weight_gradient, weight_gradient_buffer
from samebits.ops.linear import dgrad, matmul_f32, wgrad
from samebits.ops.logprob import finish, lse_state, merge_states

_TILE = 1024
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
        hidden, projection.weight, projection.bias, temperature, columns, group
    )
    return value


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: Temperature,
        columns: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        rows = hidden.bfloat16()
        lse = _log_sum_exp(rows, weight, bias, temperature, columns, group)
        total = torch.zeros(len(rows), dtype=torch.int64)
        for _, logits in _tiles(rows, weight, bias, temperature, columns):
            p, depth = _probabilities(logits, lse)
            total += (p * depth).double().mul(_UNIT).round().to(torch.int64).sum(1)
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
        dhidden = torch.zeros(rows.shape, dtype=torch.float32)
        upstream = _as_column(grads[0]) / _as_column(ctx.temperature)
        for start, logits in _tiles(rows, weight, bias, ctx.temperature, ctx.columns):
            p, depth = _probabilities(logits, lse)
            dz = upstream * (p * (depth - entropy[:, None]))
            stop = start + logits.shape[1]
            dhidden += dgrad(dz, weight[start:stop], torch.float32)
            if dw is not None:
                wgrad(dz, rows, dw[start:stop])
            if db is not None:
                # a bias is a weight whose input is always one
                wgrad(dz, torch.ones(len(rows), 1, dtype=torch.bfloat16), db[start:stop].view(-1, 1))
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
    temperature: Temperature,
    columns: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """fp32 [n] over the whole vocabulary. Tiles hold logits that are already divided."""
    states = [lse_state(logits) for _, logits in _tiles(rows, weight, bias, temperature, columns)]
    if not states:  # a rank whose rows are all padding: as if it had one column of no weight
        states = [lse_state(torch.full((len(rows), 1), float("-inf")))]
    return finish(merge_states(list(gather_states(merge_states(states), group))))


def _tiles(
    rows: Tensor, weight: Tensor, bias: Tensor | None, temperature: Temperature, columns: int
) -> Iterator[tuple[int, Tensor]]:
    """First column and scaled fp32 logits [n, up to 1024] of each tile of this rank's real columns."""
    for start in range(0, columns, _TILE):
        stop = min(start + _TILE, columns)
        logits = matmul_f32(rows, weight[start:stop].detach())
        if bias is not None:
            logits = logits + bias[start:stop].detach().float()
        yield start, logits / _as_column(temperature)


def _as_column(value: Temperature) -> Tensor:
    return value[:, None] if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)


def _probabilities(logits: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """p and lse - z of one tile; both 0 where the column has no weight or the row no log-sum-exp."""
    depth = lse[:, None] - logits
    p = exp2(depth * -LOG2_E)
    good = torch.isfinite(depth) & torch.isfinite(p)
    return torch.where(good, p, 0.0), torch.where(good, depth, 0.0)
