"""The owned primitives as Triton functions: the same IEEE operations, so the same bits as on a CPU.

Launch every kernel that uses them with `enable_fp_fusion=False`: fma is only where it is written. The
functions `exp2`, `sigmoid`, `divide`, `sqrt` and `round_bf16` below run one of them over a CUDA tensor.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.arithmetic.primitives import EXP2_COEFFICIENTS, LOG2_E

_C1, _C2, _C3, _C4, _C5, _C6 = (tl.constexpr(c) for c in EXP2_COEFFICIENTS)
_MINUS_LOG2_E = tl.constexpr(-LOG2_E)
_ROUNDER = tl.constexpr(1.5 * 2**23)  # adding it leaves no fraction bits
_BLOCK = 1024


@triton.jit
def nearest_of(x):
    """The nearest integer of fp32 |x| < 2^22, ties to even."""
    return (x + _ROUNDER) - _ROUNDER


@triton.jit
def power_of_two_of(n):
    """2^n for integral fp32 n in [-126, 127]."""
    return ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exp2_core_of(r):
    """2^r for fp32 r in [-1/2, 1/2]."""
    p = tl.fma(_C6, r, _C5)
    p = tl.fma(p, r, _C4)
    p = tl.fma(p, r, _C3)
    p = tl.fma(p, r, _C2)
    p = tl.fma(p, r, _C1)
    return tl.fma(p, r, 1.0)


@triton.jit
def exp2_of(t):
    """2^t over all of fp32, as `samebits.arithmetic.exp2`."""
    clamped = tl.maximum(tl.minimum(t, 129.0), -152.0)
    n = nearest_of(clamped)
    p = exp2_core_of(clamped - n)
    half = nearest_of(n * 0.5)
    y = p * power_of_two_of(half) * power_of_two_of(n - half)
    return tl.where(t != t, float("nan"), y)


@triton.jit
def sigmoid_of(x):
    """1 / (1 + 2^(-x log2 e)), as `samebits.arithmetic.sigmoid`."""
    # the limits of exp2 in one step: 2^128 is infinite, and what is below 2^-126 vanishes beside 1
    t = tl.minimum(tl.maximum(x * _MINUS_LOG2_E, -126.0), 128.0)
    shifted = t + _ROUNDER
    p = exp2_core_of(t - (shifted - _ROUNDER)).to(tl.int32, bitcast=True)
    y = (p + (shifted.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)
    # the card's own operations write other NaN bits
    return tl.where(x != x, float("nan"), tl.div_rn(1.0, 1.0 + y))


@triton.jit
def round_bf16_of(x):
    """fp32 -> bf16, to nearest even, NaN as 0x7fc0, as `samebits.arithmetic.round_bf16`."""
    # the card's own conversion writes other NaN bits
    rounded = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    return tl.where(x != x, 0x7FC0, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _pair(a, b):
    return a + b


@triton.jit
def fold_halves_of(lanes, ROWS: tl.constexpr, LANES: tl.constexpr):
    """[ROWS, LANES] -> [ROWS] as `samebits.arithmetic.fold_halves`: a reduction of a pair has no order."""
    if LANES == 1:
        return tl.reshape(lanes, (ROWS,))
    else:
        half = tl.reduce(tl.reshape(lanes, (ROWS, 2, LANES // 2)), 1, _pair)
        return fold_halves_of(half, ROWS, LANES // 2)


@triton.jit
def count_launch(counter):
    """Advance the counter of this kernel (`samebits.backends.device_counters.slot`) by one for the whole launch."""
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0)
    tl.atomic_add(counter, 1, mask=first, sem="relaxed")


@triton.jit
def _unary(x, y, n, WHICH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n, other=0.0)
    if WHICH == "exp2":
        out = exp2_of(v)
    elif WHICH == "sigmoid":
        out = sigmoid_of(v)
    elif WHICH == "sqrt":
        out = tl.sqrt_rn(v)
    else:
        out = round_bf16_of(v)
    tl.store(y + at, out, mask=at < n)


@triton.jit
def _divide(x, d, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    out = tl.div_rn(tl.load(x + at, mask=at < n, other=0.0), tl.load(d + at, mask=at < n, other=1.0))
    tl.store(y + at, out, mask=at < n)


def exp2(x: torch.Tensor) -> torch.Tensor:
    """2^x for a contiguous fp32 CUDA tensor."""
    return _run("exp2", x, torch.float32)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + 2^(-x log2 e)) for a contiguous fp32 CUDA tensor."""
    return _run("sigmoid", x, torch.float32)


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """The correctly rounded square root of a contiguous fp32 CUDA tensor (NaN bits are the device's)."""
    return _run("sqrt", x, torch.float32)


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """A contiguous fp32 CUDA tensor as bf16, to nearest even; every NaN becomes 0x7fc0."""
    return _run("round_bf16", x, torch.bfloat16)


def divide(x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """The correctly rounded x / d of two contiguous fp32 CUDA tensors (NaN bits are the device's)."""
    y = torch.empty_like(x)
    _divide[(triton.cdiv(x.numel(), _BLOCK),)](x, d, y, x.numel(), BLOCK=_BLOCK, enable_fp_fusion=False)
    return y


def _run(which: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty_like(x, dtype=dtype)
    _unary[(triton.cdiv(x.numel(), _BLOCK),)](x, y, x.numel(), WHICH=which, BLOCK=_BLOCK, enable_fp_fusion=False)
    return y
