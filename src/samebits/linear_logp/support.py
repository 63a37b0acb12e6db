"""The support of a request in one form, whichever it came in."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.linear_logp.types import LinearLogpRequest
from samebits.ops.sample_support import Kept


def kept_of(request: LinearLogpRequest, rows: Tensor) -> Kept | None:
    """The kept ids of `rows` int64 [n] of a request, each row's target among them; None when nothing is limited.

    From a mask, only this rank's columns and the target are named. Ids outside the vocabulary are dropped.
    """
    if request.log_prob_keep_mask is not None:
        owners, ids = request.log_prob_keep_mask[rows].nonzero(as_tuple=True)
        limited = torch.ones_like(rows, dtype=torch.bool)
        start = 0 if request.context is None else request.context.vocab_partition.local_start
        return _with_targets(owners, ids + start, limited, request, rows)
    if request.kept_ids is None:
        return None
    if request.kept_counts is not None:
        counts = request.kept_counts[rows]
        first = request.kept_counts.cumsum(0)[rows] - counts
        owners = torch.repeat_interleave(counts)
        begin = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        ids = request.kept_ids[first[owners] + torch.arange(len(owners), device=owners.device) - begin]
        limited = counts > 0
    else:
        table = request.kept_ids[rows]
        owners, columns = (table >= 0).nonzero(as_tuple=True)
        ids, limited = table[owners, columns], (table >= 0).any(1)
    return _with_targets(owners, ids, limited, request, rows) if bool(limited.any()) else None


def _with_targets(owners: Tensor, ids: Tensor, limited: Tensor, request: LinearLogpRequest, rows: Tensor) -> Kept:
    """Sorted by row, then by id, each once; a limited row keeps its target in any case."""
    real = _real_size(request)
    known = (ids >= 0) & (ids < real)
    (some,) = limited.nonzero(as_tuple=True)
    names = torch.cat([owners[known] * real + ids[known], some * real + request.target_ids[rows][some]])
    names = names.unique()
    return Kept(torch.bincount(names // real, minlength=len(rows)), names % real)


def _real_size(request: LinearLogpRequest) -> int:
    assert request.context is not None, "the samebits provider serves requests with a context"
    return request.context.vocab_partition.real_size
