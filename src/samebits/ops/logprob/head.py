"""The LM head and the log-probability in one op: logits exist only tile by tile, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from samebits.backends import lazy, pick, pick_arithmetic
from samebits.ops.gradients import deliver_weight_gradient, weight_gradient_buffer
from samebits.ops.logprob import reference
from samebits.ops.logprob.contract import MAX_TERMS
from samebits.ops.logprob.rows import NO_TARGET, Temperature, check_hidden, check_ids, check_temperature

BACKENDS = lazy("samebits.ops.logprob", "cpu", "reference", "triton")


@dataclass(frozen=True)
class _Part:
    """This rank's part of the vocabulary, and how to compute it."""

    impl: ModuleType
    temperature: Temperature
    start: int  # global id of the weight's first row
    columns: int  # real columns held here
    group: dist.ProcessGroup | None
    arithmetic: str
    gradient_parts: int


def linear_logp(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: Temperature = 1.0,
    bias: torch.Tensor | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    real_vocab: int | None = None,
    backend: str | None = None,
    arithmetic: str | None = None,
    gradient_parts: int = 1,
) -> torch.Tensor:
    """Log-probabilities of `targets` under softmax((hidden @ weight^T + bias) / temperature): fp32 [T].

    hidden [T, H] is bf16, or fp32 holding bf16 values: then its gradient arrives in fp32, not yet rounded.
    weight [V, H] bf16 holds the rows `vocab_start ..` of the vocabulary, bias [V] bf16 or fp32 likewise;
    targets int64 [T] are global ids. Columns from `real_vocab` on are padding and take no part. Targets
    outside [0, real_vocab) may be anything: their rows give +0 and no gradient. With a tensor-parallel
    `group` each rank passes its own rows of the weight and the same hidden states, targets and temperature;
    all get the same result, and each gets the part of hidden's gradient that its columns give, for the
    caller to add over ranks. That part is the sum of `gradient_parts` equal runs of the weight's rows, each a
    sum of its own, along a balanced tree: a power of two, so that ranks can hold subtrees.

    `arithmetic` says how the dot products accumulate (the device's own where none is named). Never holds
    [T, V]. Raises ValueError on other dtypes or shapes, and for a target that no rank holds.
    """
    ranks = 1 if group is None else group.size()
    real = weight.shape[0] * ranks if real_vocab is None else real_vocab
    _check(hidden, weight, bias, targets, temperature, gradient_parts)
    columns = max(0, min(weight.shape[0], real - vocab_start))
    impl = pick("logprob", BACKENDS, backend, hidden, weight, targets, bias)
    kind = pick_arithmetic("linear_logp", arithmetic, hidden)
    part = _Part(impl, temperature, vocab_start, columns, group, kind, gradient_parts)
    active = (targets >= 0) & (targets < real)
    if bool(active.all()):
        return _LinearLogp.apply(hidden, weight, bias, targets, part)
    # rows without a target are never looked at, so they can't put a NaN or a signed zero anywhere
    rows = active.nonzero()[:, 0]
    if isinstance(temperature, torch.Tensor):
        part = replace(part, temperature=temperature[rows])
    logp = _LinearLogp.apply(hidden.index_select(0, rows), weight, bias, targets[rows], part)
    return logp.new_zeros(len(targets)).index_copy(0, rows, logp)


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: Temperature,
    gradient_parts: int,
) -> None:
    if weight.dtype != torch.bfloat16 or weight.ndim != 2 or not weight.is_contiguous():
        raise ValueError(
            f"linear_logp: weight must be contiguous bfloat16 [V, H], got {weight.dtype} {list(weight.shape)}"
        )
    check_hidden("linear_logp", hidden, weight.shape[1])
    floats = (torch.bfloat16, torch.float32)
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype not in floats):
        raise ValueError(
            f"linear_logp: bias must be bfloat16 or float32 [{weight.shape[0]}], got {bias.dtype} {list(bias.shape)}"
        )
    if not 1 <= weight.shape[0] <= MAX_TERMS:
        raise ValueError(f"linear_logp: want 1 to {MAX_TERMS} rows of weight, got {weight.shape[0]}")
    if gradient_parts < 1 or gradient_parts & (gradient_parts - 1) or weight.shape[0] % gradient_parts:
        raise ValueError(
            f"linear_logp: gradient_parts must be a power of two that divides {weight.shape[0]} rows of weight, "
            f"got {gradient_parts}"
        )
    check_ids("linear_logp", "targets", targets, hidden.shape[0])
    check_temperature("linear_logp", temperature, hidden.shape[0])


def _stack_ranks(own: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Every rank's tensor, in rank order, moved as bytes."""
    if group is None or group.size() == 1:
        return [own]
    everyone = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(everyone, own.contiguous(), group=group)
    return everyone


def _combine(parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-rank [T, 6] tensors -> (merged state [T, 5], z of the target fp32 [T])."""
    state, picked = parts[0][:, :5], parts[0][:, 5]
    for part in parts[1:]:
        state = reference.merge(state, part[:, :5])
        # at most one rank holds the target, all others say NO_TARGET, which is below every bit pattern
        picked = torch.maximum(picked, part[:, 5])
    if bool((picked == NO_TARGET).any()):
        row = int((picked == NO_TARGET).nonzero()[0])
        raise ValueError(
            f"linear_logp: no rank holds the target of active row {row}; check vocab_start, real_vocab and the group"
        )
    return state.contiguous(), picked.to(torch.int32).view(torch.float32)


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        part: _Part,
    ) -> torch.Tensor:
        rows, local = hidden.bfloat16().contiguous(), targets - part.start
        real = weight[: part.columns], None if bias is None else bias[: part.columns].float().contiguous()
        if part.columns:
            own = part.impl.linear_state(rows, *real, local, part.temperature, part.arithmetic)
        else:
            own = torch.nn.functional.pad(reference.empty_state(len(rows), rows.device), (0, 1), value=NO_TARGET)
        state, z = _combine(_stack_ranks(own, part.group))
        ctx.save_for_backward(rows, weight, bias, local, part.impl.lse(state))
        ctx.part, ctx.hidden_dtype = part, hidden.dtype
        return part.impl.finish(state, z[:, None])[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, bias, local, lse = ctx.saved_tensors
        part, upstream = ctx.part, upstream.contiguous()
        dw = weight_gradient_buffer(weight) if ctx.needs_input_grad[1] else None
        dbias = weight_gradient_buffer(bias) if ctx.needs_input_grad[2] else None
        size, sums = weight.shape[0] // part.gradient_parts, []
        for start in range(0, weight.shape[0], size):
            here = slice(start, min(start + size, part.columns))
            if here.stop <= start:  # padding alone
                sums.append(torch.zeros_like(rows, dtype=torch.float32))
                continue
            sums.append(
                part.impl.linear_backward(
                    upstream,
                    rows,
                    weight[here],
                    None if bias is None else bias[here].float().contiguous(),
                    local - start,
                    part.temperature,
                    lse,
                    None if dw is None else dw[here],
                    None if dbias is None else dbias[here],
                    part.arithmetic,
                )
            )
        return (
            _add_neighbours(sums).to(ctx.hidden_dtype),
            None if dw is None else deliver_weight_gradient(weight, dw),
            None if dbias is None else deliver_weight_gradient(bias, dbias),
            None,
            None,
        )


def _add_neighbours(sums: list[torch.Tensor]) -> torch.Tensor:
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]
