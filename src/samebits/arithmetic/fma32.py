"""The arithmetic `fma32`: one fp32 accumulator, one fused multiply-add per k, k ascending.

torch has no fused multiply-add, so it is built here from float64 operations. The product of two fp32
values is exact in float64 (24 + 24 bits). The sum is not, so it is rounded *to odd* first: the last bit
is set when anything was lost, and then the rounding to fp32 is the rounding of the exact value
(S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded sums", IEEE TC 57(4), 2008).
"""

from __future__ import annotations

import torch

from samebits.arithmetic.exact import zeros_for


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """round_fp32(a * b + c) with one rounding, elementwise with broadcasting. fp32 in, fp32 out."""
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    # TwoSum (Knuth): the exact error of the float64 sum
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    inexact = (error != 0) & torch.isfinite(total) & torch.isfinite(error)
    even = (bits & 1) == 0
    # towards the error: an even last bit becomes odd by a step up or down in magnitude
    step = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where(inexact & even, bits + step, bits).view(torch.float64)
    return odd.float()


def dot(left: torch.Tensor, right: torch.Tensor, acc: torch.Tensor | None = None) -> torch.Tensor:
    """Row-by-row products: left [.., M, K], right [.., N, K] -> fp32 [.., M, N], each a chain of fma over k ascending.

    `acc` is where the chains start (+0 when not given).
    """
    a, b = left.float(), right.float()
    if acc is None:
        acc = zeros_for(a, b)
    exact_products = left.dtype == right.dtype == torch.bfloat16 and _products_are_exact(a, b)
    for k in range(a.shape[-1]):
        x, y = a[..., :, None, k], b[..., None, :, k]
        # such a product is exact in fp32, so one addition is the whole fma
        acc = acc + x * y if exact_products else fma(x, y, acc)
    return acc


def _products_are_exact(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do products of these bf16 values (8 + 8 bits) neither underflow nor overflow in fp32?"""
    sizes = [t.abs().double() for t in (a, b)]
    finite = [s[(s > 0) & s.isfinite()] for s in sizes]
    if any(s.numel() == 0 for s in finite):
        return True
    (low_a, high_a), (low_b, high_b) = ((s.min(), s.max()) for s in finite)
    return bool(low_a * low_b >= 2.0**-133) and bool(high_a * high_b < 2.0**127)
