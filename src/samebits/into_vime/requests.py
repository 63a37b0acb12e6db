"""vime's request objects, read by their attributes, as requests of our own, which check everything again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.linear_logp import (
    LinearLogpContext,
    LinearLogpProviderUnavailable,
    LinearLogpRequest,
    LinearProjection,
    TokenLayout,
    VocabPartition,
)
from samebits.linear_logp.types import Temperature

# Some revisions let values travel in metadata that change the result; we serve none of them.
REFUSED_METADATA = {
    "logits_are_temperature_scaled": "the temperature must be applied once, by the provider; send unscaled logits",
    "top_p_sparse_token_ids": "a support in metadata cannot be checked; send log_prob_keep_mask",
}


def to_request(theirs: Any) -> LinearLogpRequest:
    """The same request in our types. Raises TypeError naming an attribute that is missing, ValueError or TypeError
    for a field that breaks a rule, LinearLogpProviderUnavailable for metadata that would change the result."""
    metadata = getattr(theirs, "metadata", None) or {}
    for key, reason in REFUSED_METADATA.items():
        if metadata.get(key) is not None:
            raise LinearLogpProviderUnavailable(f"metadata {key!r}: {reason}")
    targets = _get(theirs, "target_ids")
    layout = _get(theirs, "token_layout")
    return LinearLogpRequest(
        logits=_get(theirs, "logits"),
        target_ids=_as_int64(targets),
        tensor_parallel_group=_get(theirs, "tensor_parallel_group"),
        token_layout=TokenLayout(_get(layout, "world_size"), _get(layout, "rank"), _get(layout, "layout")),
        with_entropy=bool(_get(theirs, "with_entropy")),
        with_entropy_grad=bool(_get(theirs, "with_entropy_grad") and _get(theirs, "with_entropy")),
        # vime says "off" with any number below one
        chunk_size=max(_get(theirs, "chunk_size"), 0) or -1,
        log_prob_keep_mask=getattr(theirs, "log_prob_keep_mask", None),
        context=_context(getattr(theirs, "context", None)),
        temperature=_temperature(getattr(theirs, "temperature", None)),
        metadata=metadata,
    )


def _context(theirs: Any) -> LinearLogpContext | None:
    if theirs is None:
        return None
    projection, part = _get(theirs, "projection"), _get(theirs, "vocab_partition")
    return LinearLogpContext(
        hidden=_get(theirs, "hidden"),
        projection=LinearProjection(_get(projection, "weight"), getattr(projection, "bias", None)),
        vocab_partition=VocabPartition(
            local_start=_get(part, "local_start"),
            local_size=_get(part, "local_size"),
            real_size=_get(part, "real_size"),
            padded_size=_get(part, "padded_size"),
        ),
    )


def _temperature(given: object) -> Temperature:
    """One number, or one per row: a revision also sends tensors of one element. None means that nothing is scaled."""
    if given is None:
        return 1.0
    if isinstance(given, Tensor):
        flat = given.detach().reshape(-1).float()
        return float(flat[0]) if flat.numel() == 1 else flat
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return float(given)
    raise TypeError(f"temperature must be a number or a tensor, got {type(given).__name__}")


def _as_int64(targets: object) -> Tensor:
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dtype == torch.bool:
        kind = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise TypeError(f"target_ids must be a tensor of integers, got {kind}")
    return targets.to(torch.int64).contiguous()


def _get(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise TypeError(f"{type(owner).__name__} has no {name!r}: it is no request of a known vime revision") from None
