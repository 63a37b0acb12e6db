"""Digests of rows that add up: the digest of a row is the sum of its elements' digests, modulo 2^64.

An element's digest depends on its bits and on its column in the whole row, and integers add up in any order. So
ranks that hold some columns each hold parts of one sum, and no layout shows. All steps are elementwise integer
operations and one integer sum, on whatever device the row lies: they can be captured in a graph.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from samebits.bits import raw

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def row_digests(x: Tensor, start: int = 0) -> Tensor:
    """int64 [rows] of x [rows, width], whose columns are `start` .. of the whole row."""
    bits = raw(x).to(torch.int64) & ((1 << (8 * x.element_size())) - 1 if x.element_size() < 8 else -1)
    return _mixed(bits ^ _columns(start, x.shape[1], str(x.device))).sum(dim=1)


def prefix_digests(rows: Tensor) -> Tensor:
    """int64 [n]: entry i stands for rows 0 .. i in their order. Linear in `rows` int64 [n]: it adds up over ranks."""
    weights = _columns(0, rows.shape[0], str(rows.device)) | 1
    return (rows * weights).cumsum(dim=0)


@lru_cache(maxsize=256)
def _columns(start: int, width: int, device: str) -> Tensor:
    return _mixed(torch.arange(start + 1, start + width + 1, device=device) * _GOLDEN)


def _mixed(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (G. Steele et al., 2014), elementwise."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical shift to the right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
