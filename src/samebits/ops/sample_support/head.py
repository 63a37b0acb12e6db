"""The LM head and the log-probability over the support of each row, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from samebits.backends import lazy, pick, pick_arithmetic
from samebits.ops.gradients import deliver_weight_gradient, weight_gradient_buffer
from samebits.ops.logprob import BACKENDS as LOGPROB_BACKENDS
from samebits.ops.logprob import finish, finish_logp, merge_states
from samebits.ops.logprob.rows import NO_TARGET, Temperature, check_hidden, check_ids, check_temperature
from samebits.ops.sample_support.rows import Kept

BACKENDS = lazy("samebits.ops.sample_support", "cpu", "reference", "triton")


@dataclass(frozen=True)
class _Part:
    """This rank's part of the vocabulary, and how to compute it. `kept` counts from the weight's first row, `finisher`
    is the backend of `logprob` that ends the sums of all parts."""

    impl: ModuleType
    finisher: str | None
    temperature: Temperature
    kept: Kept
    group: dist.ProcessGroup | None
    arithmetic: str


def kept_linear_logp(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept: Kept,
    temperature: Temperature = 1.0,
    bias: Tensor | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    backend: str | None = None,
    arithmetic: str | None = None,
) -> Tensor:
    """Log-probabilities of `targets` under softmax((hidden @ weight^T + bias) / temperature) over kept ids: fp32 [T].

    Arguments are those of `linear_logp`; `kept`, on any device, names ids of the whole vocabulary, at least one for
    each row, the target among them. Each tensor-parallel rank computes those ids that its rows of the weight cover;
    all get the same result. Gradients reach only kept columns: hidden gets the part that this rank's columns give.

    Raises ValueError on other dtypes or shapes, and for a target outside its row's support or held by no rank.
    """
    rows = len(hidden)
    check_ids("kept_linear_logp", "targets", targets, rows)
    check_temperature("kept_linear_logp", temperature, rows)
    kept.check(rows)
    kept = kept.to(hidden.device)
    _check(hidden, weight, bias, kept, targets)
    local = kept.inside(vocab_start, vocab_start + len(weight))
    impl = pick("kept_linear_logp", BACKENDS, backend, hidden, weight, targets, bias)
    kind = pick_arithmetic("kept_linear_logp", arithmetic, hidden)
    # a backend from outside may serve supports alone
    finisher = backend if backend and backend in LOGPROB_BACKENDS else None
    part = _Part(impl, finisher, temperature, local, group, kind)
    logp: Tensor = _KeptLogp.apply(hidden, weight, bias, targets - vocab_start, part)
    return logp


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, kept: Kept, targets: Tensor) -> None:
    if weight.dtype != torch.bfloat16 or weight.ndim != 2 or not weight.is_contiguous():
        raise ValueError(
            f"kept_linear_logp: weight must be contiguous bfloat16 [V, H], got {weight.dtype} {list(weight.shape)}"
        )
    check_hidden("kept_linear_logp", hidden, weight.shape[1])
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype not in (torch.bfloat16, torch.float32)):
        raise ValueError(
            f"kept_linear_logp: bias must be bfloat16 or float32 [{len(weight)}], got {bias.dtype} {list(bias.shape)}"
        )
    if not bool(kept.limited.all()):
        row = int((~kept.limited).nonzero()[0])
        raise ValueError(f"kept_linear_logp: row {row} keeps all ids; score it with linear_logp")
    found = targets.new_zeros(len(targets))
    found.index_add_(0, kept.owners(), (kept.ids == targets[kept.owners()]).long())
    if not bool((found == 1).all()):
        row = int((found != 1).nonzero()[0])
        raise ValueError(f"kept_linear_logp: target {int(targets[row])} of row {row} is not in its support")


def _everyone(own: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Every rank's tensor, in rank order, moved as bytes."""
    if group is None or group.size() == 1:
        return [own]
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return parts


class _KeptLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, part: _Part) -> Tensor:
        rows, offset = hidden.bfloat16().contiguous(), None if bias is None else bias.float().contiguous()
        own = part.impl.kept_state(rows, weight, offset, targets, part.temperature, part.kept, part.arithmetic)
        everyone = _everyone(own, part.group)
        state = merge_states([other[:, :5] for other in everyone])
        # one rank holds the target, all others say NO_TARGET, which is below every bit pattern
        picked = torch.stack([other[:, 5] for other in everyone]).amax(0)
        if bool((picked == NO_TARGET).any()):
            row = int((picked == NO_TARGET).nonzero()[0])
            raise ValueError(
                f"kept_linear_logp: no rank holds the target of row {row}; check vocab_start and the group"
            )
        ctx.save_for_backward(rows, weight, bias, targets, finish(state, part.finisher))
        ctx.part, ctx.hidden_dtype = part, hidden.dtype
        return finish_logp(state, picked.to(torch.int32).view(torch.float32), part.finisher)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, targets, lse = ctx.saved_tensors
        part = ctx.part
        dw = weight_gradient_buffer(weight) if ctx.needs_input_grad[1] else None
        dbias = weight_gradient_buffer(bias) if ctx.needs_input_grad[2] else None
        offset = None if bias is None else bias.float().contiguous()
        dhidden = part.impl.kept_backward(
            upstream.contiguous(),
            rows,
            weight,
            offset,
            targets,
            part.temperature,
            part.kept,
            lse,
            dw,
            dbias,
            part.arithmetic,
        )
        return (
            dhidden.to(ctx.hidden_dtype),
            None if dw is None else deliver_weight_gradient(weight, dw),
            None if dbias is None else deliver_weight_gradient(bias, dbias),
            None,
            None,
        )
