"""Floating-point values as exact integers: a signed significand and an exponent.

What the matrix-unit arithmetics are made of. Everything is int64 or an exact float64 step, elementwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

BF16_FRACTION = 7  # bits below the leading one
F32_FRACTION = 23


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 or fp32 -> (significand, exponent), both int64: x = significand * 2^(exponent - fraction bits).

    Subnormals and zeros have the exponent -126 and a significand without the leading one. For infinities and
    NaN the numbers mean nothing: `special` speaks for them.
    """
    width, fraction, integer = (
        (16, BF16_FRACTION, torch.int16) if x.dtype == torch.bfloat16 else (32, F32_FRACTION, torch.int32)
    )
    bits = x.contiguous().view(integer).long()
    field = (bits >> fraction) & 0xFF
    magnitude = (bits & ((1 << fraction) - 1)) | ((field > 0).long() << fraction)
    negative = (bits >> (width - 1)) & 1
    return magnitude * (1 - 2 * negative), field.clamp(min=1) - 127


def fill(rows: Tensor, group: int) -> Tensor:
    """[.., K] with zeros appended until `group` divides K."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[-1] % group))


def zeros_for(a: Tensor, b: Tensor) -> Tensor:
    """+0 for every row of a [.., M, K] against every row of b [.., N, K]."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_zeros(*batch, a.shape[-2], b.shape[-2], dtype=torch.float32)


def special(x: Tensor) -> Tensor:
    """fp32: infinities and NaN as they are, zeros as 0, other values as +1 or -1.

    Products and sums of a few of these are finite exactly where no infinity or NaN takes part.
    """
    x = x.float()
    return torch.where(x.isfinite(), x.sign(), x)


def top_exponent(significand: Tensor, exponent: Tensor, zero: int) -> Tensor:
    """The largest exponent over the last axis, where a zero term counts as `zero`."""
    return torch.where(significand != 0, exponent, zero).amax(-1)


def shift(value: Tensor, left: Tensor) -> Tensor:
    """value * 2^left, truncated toward zero. |value| < 2^31; left <= 31 unless value is 0."""
    return value.sign() * shift_down(value.abs(), left)


def shift_down(value: Tensor, left: Tensor) -> Tensor:
    """value * 2^left, rounded down (toward minus infinity). |value| < 2^31; left <= 31 unless value is 0."""
    return (value << left.clamp(0, 31)) >> (-left).clamp(0, 63)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64, exactly, for int64 exponents in [-1022, 1023]."""
    return ((exponent + 1023) << 52).view(torch.float64)


def nearest_fp32(value: Tensor, unit: Tensor) -> Tensor:
    """value * 2^unit as fp32, to nearest even, gradual underflow, overflow to infinity. |value| < 2^53."""
    return (value.double() * power_of_two(unit)).float()


def truncated_fp32(value: Tensor, unit: Tensor) -> Tensor:
    """value * 2^unit as fp32, toward zero, gradual underflow, +0 for what vanishes; from 2^128 on infinity.

    |value| < 2^53.
    """
    magnitude = value.abs()
    bits = torch.frexp(magnitude.double()).exponent.long()
    drop = torch.maximum(bits - 24, -149 - unit).clamp(0, 62)
    kept = (magnitude >> drop).double() * power_of_two(unit + drop)
    return torch.where(kept == 0, 0.0, value.sign() * kept).float()
