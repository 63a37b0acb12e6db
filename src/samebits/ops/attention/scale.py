"""The one constant of the softmax that is computed on the host."""

from __future__ import annotations

import struct
from functools import lru_cache

LOG2_E_64 = float.fromhex("0x1.71547652b82fep+0")  # log2(e), rounded to float64


@lru_cache(maxsize=64)
def exponent_scale(scale: float) -> float:
    """c = fp32(scale * log2 e): the product in float64, rounded once; exp(scale * s) = 2^(s * c)."""
    rounded: float = struct.unpack("<f", struct.pack("<f", scale * LOG2_E_64))[0]
    return rounded
