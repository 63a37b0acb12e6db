"""Supports of many rows at once by sorting, comparing and adding integers, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from samebits.ops.logprob.contract import WINDOW_BITS, WINDOWS
from samebits.ops.sample_support.contract import MASS_BITS
from samebits.ops.sample_support.rows import Limits

Terms = Callable[[Tensor], tuple[Tensor, Tensor]]  # z -> (q, i) of the terms q 2^(i - 23), int64
_LOW = (WINDOWS - 1) * WINDOW_BITS  # bits of the lower half of a sum over all windows

# whole numbers are spelled out in four windows of 16 bits, the lower three in one half
assert (WINDOWS, WINDOW_BITS) == (4, 16)


def kept_mask(z: Tensor, limits: Limits, terms: Terms) -> Tensor:
    """bool [T, V]: what min-p, top-k and top-p leave of scaled logits z [T, V], each row with a distribution.

    `limits` lie on the device of z.
    """
    ordered, order = (z + 0.0).sort(dim=1, descending=True, stable=True)  # + 0.0: -0 equals +0
    count = _prefix(ordered, limits, terms)
    first = torch.arange(z.shape[1], device=z.device) < count[:, None]
    return torch.zeros_like(first).scatter_(1, order, first)


def _prefix(z: Tensor, limits: Limits, terms: Terms) -> Tensor:
    """int64 [T]: how many of the descending z [T, V] are left."""
    count = (z > -torch.inf).sum(dim=1)
    longest = torch.where(limits.top_k > 0, torch.minimum(limits.top_k, count), count)
    z = z[:, : int(longest.max())]
    place = torch.arange(z.shape[1], device=z.device)
    q, i = terms(z)
    left = torch.minimum(longest, _first(_is_below(q, i, limits.min_p), place))
    held = place < left[:, None]
    under = (i[:, :1] >> 4) - (i >> 4)  # windows below that of the first
    shifted = q << (i & (WINDOW_BITS - 1))
    high, low = _whole([torch.where(held & (under == k), shifted, 0).cumsum(dim=1) for k in range(WINDOWS)])
    sums = (half[:, -1].tolist() for half in (high, low))
    wanted = [_wanted(*row) for row in zip(*sums, limits.top_p.tolist(), strict=True)]
    high_w, low_w = (torch.tensor(half, device=z.device)[:, None] for half in zip(*wanted, strict=True))
    reached = (high > high_w) | ((high == high_w) & (low >= low_w))
    return torch.where(limits.top_p < 1, torch.minimum(left, 1 + _first(reached, place)), left)


def _first(true: Tensor, place: Tensor) -> Tensor:
    """The first column that is true; the number of columns where none is."""
    return torch.where(true, place, len(place)).amin(dim=1)


def _is_below(q: Tensor, i: Tensor, min_p: Tensor) -> Tensor:
    """Whether a term is less than min_p times the first. Exact: 24 and 48 bits in float64; what is 1000 binades
    below the first is less than any min_p times it."""
    apart = i - i[:, :1]
    scale = ((apart.clamp(-1000, 0) + 1023) << 52).view(torch.float64)
    least = q[:, :1].double() * min_p.double()[:, None]
    return (q.double() * scale < least) & (min_p[:, None] > 0)


def _whole(sums: list[Tensor]) -> tuple[Tensor, Tensor]:
    """((s0 2^16 + s1) 2^16 + s2) 2^16 + s3 as halves: the lower has 48 bits."""
    ones = (1 << WINDOW_BITS) - 1
    s0, s1, s2, s3 = sums
    s2 = s2 + (s3 >> WINDOW_BITS)
    s1 = s1 + (s2 >> WINDOW_BITS)
    return s0 + (s1 >> WINDOW_BITS), (s1 & ones) << 2 * WINDOW_BITS | (s2 & ones) << WINDOW_BITS | s3 & ones


def _wanted(high: int, low: int, top_p: float) -> tuple[int, int]:
    """ceil(S F / 2^64) in the same halves."""
    total = -(-((high << _LOW) + low) * int(top_p * 2**MASS_BITS) >> MASS_BITS)
    return total >> _LOW, total & (1 << _LOW) - 1
