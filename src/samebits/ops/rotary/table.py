"""The table of cosines and sines, the same on every machine.

numpy and libm pick other code on other processors, so the table is built from +, -, * of float64 alone:
the angle is reduced by multiples of pi/2 held in three parts (W. Cody, W. Waite, "Software Manual for the
Elementary Functions", 1980) and the Taylor series are cut where they are below half an ulp of float64.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from math import factorial

import numpy as np
import torch

# pi/2 = sum of the parts; the first two have 33 bits, so that a multiple below 2^20 of each is exact
HALF_PI = (
    float.fromhex("0x1.921fb54400000p+0"),
    float.fromhex("0x1.0b4611a600000p-34"),
    float.fromhex("0x1.3198a2e037073p-69"),
)
TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
MAX_POSITIONS = 1 << 20


def inverse_frequencies(head_dim: int, base: float) -> np.ndarray:
    """base^(-2i/D) for i < D/2 as float64, rounded from 40 decimal digits."""
    with localcontext() as context:
        context.prec = 40
        return np.array([float(Decimal(base) ** (Decimal(-2 * i) / Decimal(head_dim))) for i in range(head_dim // 2)])


def _series(r: np.ndarray, first: int) -> np.ndarray:
    """sum of (-1)^k r^(2k + first) / (2k + first)! by Horner's rule, |r| <= pi/4."""
    square = r * r
    total = np.zeros_like(r)
    for k in range(9, -1, -1):
        total = total * square + (-1.0) ** k / factorial(2 * k + first)
    return total * r if first else total


def rotary_table(head_dim: int, base: float, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each fp32 [max_positions, head_dim / 2], of position * base^(-2i / head_dim).

    Raises ValueError for an odd head_dim or more than 2^20 positions.
    """
    if head_dim % 2 or head_dim < 2:
        raise ValueError(f"rotary_table: head_dim must be even, got {head_dim}")
    if not 0 < max_positions <= MAX_POSITIONS:
        raise ValueError(f"rotary_table: max_positions must be in 1..{MAX_POSITIONS}, got {max_positions}")
    angle = np.arange(max_positions, dtype=np.float64)[:, None] * inverse_frequencies(head_dim, base)
    quarter = np.rint(angle * TWO_OVER_PI)
    r = angle
    for part in HALF_PI:
        r = r - quarter * part
    cos, sin = _series(r, 0), _series(r, 1)
    turn = quarter.astype(np.int64) % 4
    full_cos = np.choose(turn, [cos, -sin, -cos, sin])
    full_sin = np.choose(turn, [sin, cos, -sin, -cos])
    return torch.from_numpy(full_cos.astype(np.float32)), torch.from_numpy(full_sin.astype(np.float32))


def table_base(cos: torch.Tensor, sin: torch.Tensor) -> float:
    """The base that a table [positions, head_dim / 2] was made with, to 6 digits; 0 where it does not show.

    The second column turns by base^(-2/head_dim) per position, and row 1 holds one such turn.
    """
    if cos.shape[0] < 2 or cos.shape[1] < 2:
        return 0.0
    angle = math.atan2(float(sin[1, 1]), float(cos[1, 1]))
    return float(f"{angle ** -cos.shape[1]:.6g}") if angle > 0 else 0.0
