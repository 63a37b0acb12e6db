"""The arithmetic `cdna3`: a published model of the bf16 matrix cores of MI300X. Not confirmed on the chip.

The model is the one of P. Xie, Y. Wang, F. Yang, M. Yang, "MMA-Sim: Bit-Accurate Reference Model of Tensor
Cores and Matrix Cores" (arXiv 2511.10909) for v_mfma_f32_16x16x16_bf16. One step takes 8 consecutive k. The 8
exact products are aligned to their largest exponent, cut off (toward zero) at 24 fractional bits and summed.
That sum and the accumulator are then aligned to the larger of their exponents, the sum rounded down (toward
minus infinity) at 31 fractional bits and the accumulator rounded down at 24; their sum is rounded to nearest
even.

Corners, as published or, where marked, decided here (all unconfirmed): a product of magnitude 2^128 or more is
an infinity; exponents are those of the encoding, -126 for subnormals and zeros, also for a zero product; a sum
of zero is +0 (decided); every NaN is 0x7fc00000 (decided); infinities follow IEEE. A short last group is filled
with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.arithmetic.exact import (
    BF16_FRACTION,
    F32_FRACTION,
    fill,
    nearest_fp32,
    shift,
    shift_down,
    special,
    split,
    top_exponent,
    zeros_for,
)
from samebits.arithmetic.rounding import canonical_nan

GROUP = 8
PRODUCT_FRACTION = 24
SUM_FRACTION = 31
ZERO_EXPONENT = -126


def dot(a: Tensor, b: Tensor, acc: Tensor | None = None) -> Tensor:
    """a [.., M, K], b [.., N, K], both bf16 -> fp32 [.., M, N]; `acc` is where the sums start (+0 if not given)."""
    total = zeros_for(a, b) if acc is None else acc
    a, b = (fill(t, GROUP) for t in (a, b))
    for k in range(0, a.shape[-1], GROUP):
        total = step(a[..., k : k + GROUP], b[..., k : k + GROUP], total)
    return total


def step(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    """One group: a [.., M, 8], b [.., N, 8], acc [.., M, N] -> [.., M, N]."""
    (left, left_exponent), (right, right_exponent) = split(a), split(b)
    products = left[..., :, None, :] * right[..., None, :, :]
    exponents = left_exponent[..., :, None, :] + right_exponent[..., None, :, :]
    peak = top_exponent(products, exponents, ZERO_EXPONENT)
    total = shift(products, exponents - peak[..., None] + (PRODUCT_FRACTION - 2 * BF16_FRACTION)).sum(-1)
    start, start_exponent = split(acc)
    top = torch.maximum(peak, start_exponent)
    widen = SUM_FRACTION - PRODUCT_FRACTION
    total = shift_down(total, peak - top + widen)
    total += shift_down(start, start_exponent - top + (PRODUCT_FRACTION - F32_FRACTION)) << widen
    rounded = nearest_fp32(total, top - SUM_FRACTION)
    kind = special(acc) + _special_products(a, b, products, exponents).sum(-1)
    return torch.where(kind.isfinite(), rounded, canonical_nan(kind))


def _special_products(a: Tensor, b: Tensor, products: Tensor, exponents: Tensor) -> Tensor:
    overflow = (products.abs() >> (2 * BF16_FRACTION + 1) > 0).long() + exponents >= 128
    kind = special(a)[..., :, None, :] * special(b)[..., None, :, :]
    return torch.where(overflow & kind.isfinite(), kind * float("inf"), kind)
