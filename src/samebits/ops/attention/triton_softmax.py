"""The pieces of the matrix form (matrix_form.py) as Triton functions."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from samebits.ops.attention.contract import CHUNK, LEAST_EXPONENT, SUM_LANES, TILE, WEIGHT_COEFFICIENTS

KEYS: tl.constexpr = tl.constexpr(TILE)
TILES: tl.constexpr = tl.constexpr(CHUNK // TILE)
SUMS: tl.constexpr = tl.constexpr(SUM_LANES)
_C1, _C2, _C3 = (tl.constexpr(c) for c in WEIGHT_COEFFICIENTS)
_LEAST = tl.constexpr(LEAST_EXPONENT)
_ROUNDER = tl.constexpr(1.5 * 2**23)


@triton.jit
def add_pair(a, b):
    return a + b


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def weight_of(t):
    """2^t by a polynomial of degree three; t below -125, and NaN, count as -125."""
    x = tl.maximum(t, _LEAST)
    y = x + _ROUNDER
    r = x - (y - _ROUNDER)
    p = tl.fma(tl.fma(tl.fma(_C3, r, _C2), r, _C1), r, 1.0)
    return (p.to(tl.int32, bitcast=True) + (y.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def rescaling_of(m, m_next):
    """The weight of what was seen under the maximum m; NaN where m_next is not finite."""
    return weight_of(m - m_next) + (m_next - m_next)


@triton.jit
def fold_columns(x, ROWS: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr):
    """[ROWS, FROM] -> [ROWS, TO]: the upper half of the columns is added onto the lower half. A pair has no order."""
    if FROM == TO:
        return x
    else:
        half = tl.reduce(tl.reshape(x, (ROWS, 2, FROM // 2)), 1, add_pair)
        return fold_columns(half, ROWS, FROM // 2, TO)


@triton.jit
def tile_of(m, lanes, acc, s, v, c, valid, live, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """The state after one tile: scores s [ROWS, KEYS] and values v [KEYS, D]; valid and live only where MASKED."""
    if MASKED:
        top = tl.reduce(tl.where(valid, s, float("-inf")), 1, larger)
    else:
        top = tl.reduce(s, 1, larger)
    m_next = larger(m, top * c)
    a = rescaling_of(m, m_next)
    p = weight_of(tl.fma(s, c, -m_next[:, None]))
    if MASKED:
        a = tl.where(live, a, 1.0)
        p = tl.where(valid, p, 0.0)
    lanes = tl.fma(lanes, a[:, None], fold_columns(p, ROWS, KEYS, SUMS))
    acc = tl.dot(p.to(tl.bfloat16), v, acc * a[:, None])
    return m_next, lanes, acc


@triton.jit
def merged(m, lsum, acc, m_later, lsum_later, acc_later):
    """The state over a run of chunks and the chunk after it."""
    m_next = larger(m, m_later)
    a = rescaling_of(m, m_next)
    b = rescaling_of(m_later, m_next)
    return m_next, tl.fma(lsum, a, lsum_later * b), tl.fma(acc, a[:, None], acc_later * b[:, None])
