"""Owned elementary functions: fixed sequences of IEEE fp32 operations, with fma only where written.

csrc/primitives.h holds the same sequences for the compiled kernels.
"""

from __future__ import annotations

import torch

from samebits.arithmetic.fma32 import fma
from samebits.arithmetic.rounding import canonical_nan

LOG2_E = float.fromhex("0x1.715476p+0")  # log2(e), rounded to fp32

# 2^r - 1 over r on [-1/2, 1/2]: a Chebyshev fit of five degrees, coefficients rounded to fp32
EXP2_COEFFICIENTS = tuple(
    float.fromhex(c)
    for c in (
        "0x1.62e430p-1",
        "0x1.ebfbe0p-3",
        "0x1.c6af6cp-5",
        "0x1.3b2a54p-7",
        "0x1.5f0890p-10",
        "0x1.44138ap-13",
    )
)


def exp2_core(r: torch.Tensor) -> torch.Tensor:
    """2^r for fp32 r in [-1/2, 1/2], in [0.707, 1.415]: Horner's rule with fma; exactly 1 at 0."""
    p = torch.full_like(r, EXP2_COEFFICIENTS[-1])
    for c in EXP2_COEFFICIENTS[-2::-1]:
        p = fma(p, r, torch.full_like(r, c))
    return fma(p, r, torch.ones_like(r))


def power_of_two(n: torch.Tensor) -> torch.Tensor:
    """2^n for integral fp32 n in [-126, 127], exactly."""
    return ((n.to(torch.int32) + 127) << 23).view(torch.float32)


def exp2(t: torch.Tensor) -> torch.Tensor:
    """2^t for any fp32 t: gradual underflow below -126, +inf from 128 on, NaN for NaN. Within 0.911 ulp."""
    clamped = torch.where(torch.isnan(t), torch.full_like(t, 129.0), t.clamp(-152.0, 129.0))
    n = clamped.round()
    p = exp2_core(clamped - n)
    half = (n * 0.5).round()
    y = p * power_of_two(half) * power_of_two(n - half)
    return torch.where(torch.isnan(t), torch.full_like(t, float("nan")), y)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + 2^(-x log2 e)) in fp32; NaN is 0x7fc00000. Within 2.523 max(1, |x|) ulp, or 2^-126 of 0."""
    return canonical_nan(1.0 / (1.0 + exp2(x * -LOG2_E)))


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """The correctly rounded square root of fp32; NaN is 0x7fc00000.

    torch's own on a CPU is not: the vector library behind it is off by one last place for 0.3 % of inputs. In
    float64 its error is far too small to move the rounding to fp32.
    """
    return canonical_nan(torch.sqrt(x.double()).float())


def fold_halves(lanes: torch.Tensor) -> torch.Tensor:
    """[..., 2^p] -> [...]: the upper half is added onto the lower half until one lane is left."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def lane_dot(a: torch.Tensor, b: torch.Tensor, lanes: int) -> torch.Tensor:
    """fp32 [..., W] x [..., W] -> [...]: lane j chains fma over i = j (mod lanes), ascending; then fold_halves."""
    acc = a.new_zeros(*a.shape[:-1], lanes)
    for start in range(0, a.shape[-1], lanes):
        x, y = a[..., start : start + lanes], b[..., start : start + lanes]
        n = x.shape[-1]
        acc = torch.cat([fma(x, y, acc[..., :n]), acc[..., n:]], dim=-1)
    return fold_halves(acc)
