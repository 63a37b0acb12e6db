"""The samebits provider: log-probabilities and entropy from hidden states and the LM head's weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from samebits.collectives import copy_to_group
from samebits.contract import digest_of
from samebits.linear_logp.entropy import linear_entropy
from samebits.linear_logp.errors import LinearLogpProviderUnavailable
from samebits.linear_logp.types import LinearLogpContext, LinearLogpRequest, LinearLogpResult, Temperature
from samebits.ops.logprob import LOGPROB, linear_logp

BACKEND_ID = "samebits.ops.logprob.cpu"


def contract_id(boundary: Mapping[str, Any]) -> str:
    """The identity of log-probabilities under this boundary (as data, as a run contract holds it).

    It names arithmetic only: no rank, layout or size, so that a trainer and an engine that are cut differently agree.
    """
    return f"samebits.linear_logp.{boundary['name']}@{boundary['version']}:{digest_of(boundary)[:16]}"


CONTRACT_ID = contract_id(LOGPROB.as_data())


def provider(request: LinearLogpRequest) -> LinearLogpResult:
    """Scores the active rows; [T, V] never exists, forward or backward.

    Raises LinearLogpProviderUnavailable without a context, off the CPU, for other dtypes than bf16, and for a kept
    support under tensor parallelism; ValueError for an active target that is no token.
    """
    context = _served_context(request)
    rows = request.active_rows()
    targets = request.target_ids[rows]
    _check_targets(targets, context.vocab_partition.real_size)
    temperature = _temperature_of(request, rows)
    hidden = context.hidden.index_select(0, rows)
    if request.ranks > 1:
        # fp32 in, so that the gradient's parts from the ranks' columns meet before they are rounded, not after
        hidden = copy_to_group(hidden.float(), request.tensor_parallel_group)
    kept = _kept_ids(request, rows)
    if kept is None:
        logp = _score(context, hidden, targets, temperature, request)
    else:
        logp = _score_kept(context, hidden, targets, temperature, kept)
    entropy = None
    if request.with_entropy:
        with torch.set_grad_enabled(torch.is_grad_enabled() and request.with_entropy_grad):
            entropy = _place(linear_entropy(context, hidden, temperature, request.tensor_parallel_group), rows, request)
    return LinearLogpResult(
        logp=_place(logp, rows, request)[:, None],
        entropy=entropy,
        backend_id=BACKEND_ID,
        contract_id=CONTRACT_ID,
        provenance={"route": "R", "rows": len(rows), "tensor_parallel_ranks": request.ranks},
    )


def _served_context(request: LinearLogpRequest) -> LinearLogpContext:
    context = request.context
    if context is None:
        raise LinearLogpProviderUnavailable(
            "the request has no context: logits were rounded by whoever made them; capture hidden states and weight"
        )
    if request.target_ids.device.type != "cpu":
        raise LinearLogpProviderUnavailable(f"serves the CPU, the request is on {request.target_ids.device}")
    for name, tensor in (("hidden", context.hidden), ("weight", context.projection.weight)):
        if tensor.dtype != torch.bfloat16:
            raise LinearLogpProviderUnavailable(f"serves bfloat16, {name} is {tensor.dtype}")
    if request.ranks > 1 and (request.kept_ids is not None or request.log_prob_keep_mask is not None):
        raise LinearLogpProviderUnavailable("a kept support is served on one tensor-parallel rank")
    return context


def _temperature_of(request: LinearLogpRequest, rows: Tensor) -> Temperature:
    given = request.temperature
    return given[rows].contiguous() if isinstance(given, Tensor) else float(given)


def _check_targets(targets: Tensor, real_size: int) -> None:
    outside = (targets < 0) | (targets >= real_size)
    if bool(outside.any()):
        raise ValueError(
            f"an active row has target {int(targets[outside][0])}, but the vocabulary is [0, {real_size}); "
            "make the row inactive"
        )


def _score(
    context: LinearLogpContext, hidden: Tensor, targets: Tensor, temperature: Temperature, request: LinearLogpRequest
) -> Tensor:
    return linear_logp(
        hidden,
        context.projection.weight,
        targets,
        temperature=temperature,
        bias=context.projection.bias,
        vocab_start=context.vocab_partition.local_start,
        group=request.tensor_parallel_group,
        real_vocab=context.vocab_partition.real_size,
        gradient_parts=context.vocab_partition.gradient_parts,
    )


def _kept_ids(request: LinearLogpRequest, rows: Tensor) -> list[Tensor] | None:
    """Per active row the ids that the sampler kept; None when it kept all."""
    if request.kept_ids is not None:
        return [ids[ids >= 0] for ids in request.kept_ids[rows]]
    if request.log_prob_keep_mask is not None:
        return [mask.nonzero()[:, 0] for mask in request.log_prob_keep_mask[rows]]
    return None


def _score_kept(
    context: LinearLogpContext, hidden: Tensor, targets: Tensor, temperature: Temperature, kept: list[Tensor]
) -> Tensor:
    """Row by row over the rows of the weight that were kept; the target always is."""
    projection, real = context.projection, context.vocab_partition.real_size
    scores = []
    for row, (target, ids) in enumerate(zip(targets, kept, strict=True)):
        others = torch.unique(ids[(ids != target) & (ids < real)])
        support = torch.cat([others, target[None]])
        scores.append(
            linear_logp(
                hidden[row : row + 1],
                projection.weight.index_select(0, support),
                torch.tensor([len(others)]),
                temperature=temperature[row : row + 1] if isinstance(temperature, Tensor) else temperature,
                bias=None if projection.bias is None else projection.bias.index_select(0, support),
            )
        )
    return torch.cat(scores) if scores else hidden.new_zeros(0, dtype=torch.float32)


def _place(scores: Tensor, rows: Tensor, request: LinearLogpRequest) -> Tensor:
    """[T] with the scores of the active rows, +0 elsewhere."""
    return scores.new_zeros(request.rows).index_copy(0, rows, scores)
