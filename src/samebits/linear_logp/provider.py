"""The samebits provider: log-probabilities and entropy from hidden states and the LM head's weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from samebits.backends import device_arithmetic
from samebits.collectives import copy_to_group
from samebits.contract import digest_of
from samebits.linear_logp.entropy import linear_entropy
from samebits.linear_logp.errors import LinearLogpProviderUnavailable
from samebits.linear_logp.support import kept_of
from samebits.linear_logp.types import LinearLogpContext, LinearLogpRequest, LinearLogpResult, Temperature
from samebits.ops.logprob import LOGPROB, linear_logp
from samebits.ops.logprob.rows import temperature_at
from samebits.ops.sample_support import Kept, kept_linear_logp

# The backend of the LM head by the type of the device that the tensors are on.
BACKENDS = {"cpu": "samebits.ops.logprob.cpu", "cuda": "samebits.ops.logprob.triton"}


def contract_id(boundary: Mapping[str, Any], arithmetic: str = "fma32") -> str:
    """The identity of log-probabilities under this boundary (as data, as a run contract holds it).

    It names arithmetic only: no rank, layout or size, so that a trainer and an engine that are cut differently agree.
    How dot products accumulate is named where it is not fma32.
    """
    name = f"samebits.linear_logp.{boundary['name']}@{boundary['version']}:{digest_of(boundary)[:16]}"
    return name if arithmetic == "fma32" else f"{name}:{arithmetic}"


CONTRACT_ID = contract_id(LOGPROB.as_data())


def provider(request: LinearLogpRequest) -> LinearLogpResult:
    """Scores the active rows; [T, V] never exists, forward or backward.

    Raises LinearLogpProviderUnavailable without a context, for other dtypes than bf16, on devices without kernels, and
    for gradients that have no tree; ValueError for an active target that is no token.
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
    kept = kept_of(request, rows)
    if kept is None:
        logp = _score(context, hidden, targets, temperature, request)
    else:
        logp = _score_kept(context, hidden, targets, temperature, request, kept)
    entropy = None
    if request.with_entropy:
        with torch.set_grad_enabled(torch.is_grad_enabled() and request.with_entropy_grad):
            entropy = _place(linear_entropy(context, hidden, temperature, request.tensor_parallel_group), rows, request)
    return LinearLogpResult(
        logp=_place(logp, rows, request)[:, None],
        entropy=entropy,
        backend_id=BACKENDS[hidden.device.type],
        contract_id=contract_id(LOGPROB.as_data(), device_arithmetic(hidden.device)),
        provenance={
            "route": "R",
            "rows": len(rows),
            "limited_rows": 0 if kept is None else int(kept.limited.sum()),
            "tensor_parallel_ranks": request.ranks,
        },
    )


def _served_context(request: LinearLogpRequest) -> LinearLogpContext:
    context = request.context
    if context is None:
        raise LinearLogpProviderUnavailable(
            "the request has no context: logits were rounded by whoever made them; capture hidden states and weight"
        )
    device = request.target_ids.device
    if device.type not in BACKENDS:
        raise LinearLogpProviderUnavailable(f"serves {', '.join(BACKENDS)}, the request is on {device}")
    for name, tensor in (("hidden", context.hidden), ("weight", context.projection.weight)):
        if tensor.dtype != torch.bfloat16:
            raise LinearLogpProviderUnavailable(f"serves bfloat16, {name} is {tensor.dtype}")
    weight, bias = context.projection.weight, context.projection.bias
    if not weight.is_contiguous():
        raise LinearLogpProviderUnavailable(f"serves a contiguous weight, its strides are {weight.stride()}")
    if bias is not None and bias.dtype not in (torch.bfloat16, torch.float32):
        raise LinearLogpProviderUnavailable(f"serves a bias of bfloat16 or float32, it is {bias.dtype}")
    if torch.is_grad_enabled() and context.hidden.requires_grad:
        _check_tree(request, context.vocab_partition.gradient_parts)
    return context


def _check_tree(request: LinearLogpRequest, parts: int) -> None:
    """The gradient of the hidden states adds up along a balanced tree over ranks, and over parts of a rank's rows."""
    for count, what in ((request.ranks, "ranks"), (parts, "gradient_parts")):
        if count & (count - 1):
            raise LinearLogpProviderUnavailable(f"a tree over {count} {what} is not balanced; it serves 1, 2, 4, ...")
    limited = request.kept_ids is not None or request.log_prob_keep_mask is not None
    if parts > 1 and (limited or request.with_entropy_grad):
        raise LinearLogpProviderUnavailable("a gradient over a support or of an entropy has no gradient_parts")


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


def _score_kept(
    context: LinearLogpContext,
    hidden: Tensor,
    targets: Tensor,
    temperature: Temperature,
    request: LinearLogpRequest,
    kept: Kept,
) -> Tensor:
    """Rows with a support over that, the others over the whole vocabulary."""
    limited, free = (mask.nonzero()[:, 0] for mask in (kept.limited, ~kept.limited))
    logp = kept_linear_logp(
        hidden.index_select(0, limited),
        context.projection.weight,
        targets[limited],
        kept.select(limited),
        temperature=temperature_at(temperature, limited),
        bias=context.projection.bias,
        vocab_start=context.vocab_partition.local_start,
        group=request.tensor_parallel_group,
    )
    if not len(free):
        return logp
    others = _score(context, hidden.index_select(0, free), targets[free], temperature_at(temperature, free), request)
    return torch.cat([logp, others]).index_select(0, torch.cat([limited, free]).argsort())


def _place(scores: Tensor, rows: Tensor, request: LinearLogpRequest) -> Tensor:
    """[T] with the scores of the active rows, +0 elsewhere."""
    return scores.new_zeros(request.rows).index_copy(0, rows, scores)
