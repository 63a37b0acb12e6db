"""The arithmetic `sm90`: how the tensor cores of H100 and H200 accumulate bf16 products in fp32.

One step takes 16 consecutive k. The 16 exact products and the accumulator are aligned to their largest
exponent, each is cut off (toward zero) at 25 fractional bits, the integers are summed exactly, and the sum is
cut off (toward zero) to fp32. `docs/arithmetic.md` says what was measured and where.

Corners, all measured on an H200: exponents are those of the encoding (a product's is the sum of its factors',
and its significand product in [1, 4) is not normalised first), -126 for subnormals; zeros, of the accumulator
or a product, count as -133 whatever the partner; a sum of zero and one that vanishes below 2^-149 are +0; a sum
from 2^128 on is infinity; infinities and NaN follow IEEE (inf * 0 and inf - inf are NaN), every NaN is
0x7fffffff. A short last group is filled with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.arithmetic.exact import (
    BF16_FRACTION,
    F32_FRACTION,
    fill,
    shift,
    special,
    split,
    top_exponent,
    truncated_fp32,
    zeros_for,
)

GROUP = 16
FRACTION = 25
ZERO_EXPONENT = -133
NAN = 0x7FFFFFFF


def dot(a: Tensor, b: Tensor, acc: Tensor | None = None) -> Tensor:
    """a [.., M, K], b [.., N, K], both bf16 -> fp32 [.., M, N]; `acc` is where the sums start (+0 if not given)."""
    total = zeros_for(a, b) if acc is None else acc
    a, b = (fill(t, GROUP) for t in (a, b))
    for k in range(0, a.shape[-1], GROUP):
        total = step(a[..., k : k + GROUP], b[..., k : k + GROUP], total)
    return total


def step(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    """One group: a [.., M, 16], b [.., N, 16], acc [.., M, N] -> [.., M, N]."""
    (left, left_exponent), (right, right_exponent) = split(a), split(b)
    products = left[..., :, None, :] * right[..., None, :, :]
    exponents = left_exponent[..., :, None, :] + right_exponent[..., None, :, :]
    start, start_exponent = split(acc)
    start_top = top_exponent(start[..., None], start_exponent[..., None], ZERO_EXPONENT)
    top = torch.maximum(top_exponent(products, exponents, ZERO_EXPONENT), start_top)
    aligned = shift(products, exponents - top[..., None] + (FRACTION - 2 * BF16_FRACTION)).sum(-1)
    aligned += shift(start, start_exponent - top + (FRACTION - F32_FRACTION))
    rounded = truncated_fp32(aligned, top - FRACTION)
    kind = special(acc) + (special(a)[..., :, None, :] * special(b)[..., None, :, :]).sum(-1)
    nan = torch.tensor(NAN, dtype=torch.int32, device=acc.device).view(torch.float32)
    return torch.where(kind.isnan(), nan, torch.where(kind.isinf(), kind, rounded))
