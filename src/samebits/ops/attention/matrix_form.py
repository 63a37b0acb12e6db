"""The softmax that goes with the arithmetic of a matrix unit, by bits: few operations per score, no shuffles.

p is rounded to bf16 for the product with v anyway, so a polynomial of degree three is enough (the largest p of a
row is 1 whatever the polynomial). A row sum keeps eight lanes until the end of a chunk: in the register layout of a
matrix unit one thread holds the values that fold together.
"""

from __future__ import annotations

import torch

from samebits.arithmetic import dot, fma
from samebits.ops.attention.contract import LEAST_EXPONENT, SUM_LANES, WEIGHT_COEFFICIENTS

_ROUNDER = 1.5 * 2.0**23


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # m [H, n], sum [H, n] or lanes of it, weighted values


def weight(t: torch.Tensor) -> torch.Tensor:
    """2^t for t up to some units, within 1.02e-4 of itself; t below LEAST_EXPONENT, and NaN, count as that."""
    x = torch.where(t > LEAST_EXPONENT, t, torch.full_like(t, LEAST_EXPONENT))
    y = x + _ROUNDER
    r = x - (y - _ROUNDER)
    c1, c2, c3 = (torch.full_like(r, c) for c in WEIGHT_COEFFICIENTS)
    p = fma(fma(fma(c3, r, c2), r, c1), r, torch.ones_like(r))
    return (p.view(torch.int32) + (y.view(torch.int32) << 23)).view(torch.float32)


def rescaling(m: torch.Tensor, m_next: torch.Tensor) -> torch.Tensor:
    """The weight that what was seen under the maximum m has under m_next; NaN where m_next is not finite."""
    return weight(m - m_next) + (m_next - m_next)


def add_tile(
    state: Parts, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor, c: float, arithmetic: str
) -> Parts:
    """One tile of keys k, v [H, TILE, D], of which row i attends to those with valid [n, TILE]; sums are lanes."""
    m, lanes, acc = state
    s = dot(q.bfloat16(), k.bfloat16(), None, arithmetic)
    top = torch.where(valid, s, -torch.inf).amax(-1) * c
    m_next = torch.maximum(m, top)  # NaN if one is NaN
    a = rescaling(m, m_next)[..., None]
    p = torch.where(valid, weight(_fma(s, c, -m_next[..., None])), 0.0)
    acc = dot(p.bfloat16(), v.transpose(-1, -2).bfloat16(), acc * a, arithmetic)
    return m_next, fma(lanes, a.expand_as(lanes), folded(p)), acc


def merge(state: Parts, later: Parts) -> Parts:
    """The state over an earlier run of chunks and over the chunk that follows it."""
    m = torch.maximum(state[0], later[0])
    a, b = rescaling(state[0], m), rescaling(later[0], m)
    acc = fma(state[2], a[..., None].expand_as(state[2]), later[2] * b[..., None])
    return m, fma(state[1], a, later[1] * b), acc


def folded(p: torch.Tensor) -> torch.Tensor:
    """[.., TILE] -> [.., SUM_LANES]: the upper half is added onto the lower half while there are more lanes."""
    while p.shape[-1] > SUM_LANES:
        half = p.shape[-1] // 2
        p = p[..., :half] + p[..., half:]
    return p


def probability(s: torch.Tensor, c: float, m: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """The backward's P from scores and the forward's statistics m and 1 / l (which broadcast)."""
    return weight(_fma(s, c, -m)) * inverse


def _fma(s: torch.Tensor, c: float, addend: torch.Tensor) -> torch.Tensor:
    return fma(s, torch.full_like(s, c), addend.expand_as(s))
