"""Comparing two lists of fp32 bit patterns. Standard library only: the loop and the verifier share it.

A token mismatches when its two patterns differ in any bit, so -0.0 and +0.0 differ. Differences are taken
in float64 over tokens where both values are finite; sums are exact (`math.fsum`), so no order can show.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_EXPONENT = 0x7F800000


@dataclass(frozen=True, kw_only=True)
class Worst:
    """The token that differs most: its sample, its position in the response, and both bit patterns."""

    key: str
    position: int
    rollout_bits: int
    trainer_bits: int

    def __str__(self) -> str:
        return f"{self.key}@{self.position}"

    def describe(self) -> str:
        left, right = as_float(self.rollout_bits), as_float(self.trainer_bits)
        return f"{self}: rollout {left!r} (0x{self.rollout_bits:08x}), trainer {right!r} (0x{self.trainer_bits:08x})"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Counts over active response tokens; `nonfinite_count` counts tokens with NaN or infinity on a side."""

    compared_tokens: int
    mismatch_count: int
    nonfinite_count: int
    max_abs_diff: float
    mean_abs_diff: float
    worst: Worst | None


def as_float(bits: int) -> float:
    """The fp32 value with this pattern, as a Python float (exact)."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def compare(samples: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> Comparison:
    """Compares (key, rollout bits, trainer bits) of each sample, token by token.

    Raises ValueError when the two sides of a sample have different lengths: a gap is never filled.
    """
    compared = nonfinite = 0
    mismatches: list[tuple[float, Worst]] = []
    for key, rollout, trainer in samples:
        if len(rollout) != len(trainer):
            raise ValueError(
                f"sample {key}: {len(rollout)} log-probabilities from rollout, {len(trainer)} from trainer"
            )
        compared += len(rollout)
        for position, (left, right) in enumerate(zip(rollout, trainer, strict=True)):
            finite = left & _EXPONENT != _EXPONENT and right & _EXPONENT != _EXPONENT
            nonfinite += not finite
            if left != right:
                difference = abs(as_float(left) - as_float(right)) if finite else math.inf
                mismatches.append(
                    (
                        difference,
                        Worst(key=key, position=position, rollout_bits=left, trainer_bits=right),
                    )
                )
    finite_differences = [difference for difference, _ in mismatches if difference < math.inf]
    worst = max(mismatches, key=lambda pair: pair[0], default=(0.0, None))[1]
    return Comparison(
        compared_tokens=compared,
        mismatch_count=len(mismatches),
        nonfinite_count=nonfinite,
        max_abs_diff=max(finite_differences, default=0.0),
        mean_abs_diff=math.fsum(finite_differences) / max(compared - nonfinite, 1),
        worst=worst,
    )
