"""`python -m samebits.testing.sweep [STEP]`: the owned primitives over every fp32 input.

With STEP, which is 1 or 61: over every STEP-th block of 4096 inputs.

Checks three things: the promised error, the promised monotonicity, and the digest of all output bits. For the first
four an H200 (Triton) and two other instruction sets gave the same digests. Prints a table; exits with 1 when a promise
is broken.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from samebits import _cpu


@dataclass(frozen=True)
class Promise:
    """`unit` says what `error` counts; `decreases` pairs of neighbouring inputs go down, by one last place each.

    `digest` is the sum of output bits * (2 i + 1) over all input patterns i, modulo 2^64; `digests` gives it (and the
    decreases) for every STEP-th block of 4096 inputs.
    """

    name: str
    code: int
    error: float
    unit: str
    decreases: int
    digests: dict[int, tuple[int, int]]


ULP = "last places of the exact result"
PROMISES = (
    Promise("exp2", 0, 0.911, ULP, 83365, {1: (0x3F1DDFF53130EBF7, 83365), 61: (0x27032CF888A68F2D, 1339)}),
    Promise(
        "sigmoid", 1, 2.523, f"{ULP}, times max(1, |x|), at least 2^-126", 11286,
        {1: (0x6D3C97EAA6AFFCC0, 11286), 61: (0xA91AA4B115CC869A, 176)},
    ),
    Promise("sqrt", 2, 0.5, ULP, 0, {1: (0x7006B0C70AE30BB6, 0), 61: (0x59FC811C470F5738, 0)}),
    Promise("round_bf16", 3, 0.5, ULP, 0, {1: (0xCAA094C0BF800000, 0), 61: (0x25AC72EB87E4FDE9, 0)}),
    Promise("1 / x", 4, 0.5, ULP, 0, {1: (0xFAF1C70885E898A4, 0), 61: (0x751D3A411D30E872, 0)}),
    Promise("x / 0.7", 5, 0.5, ULP, 0, {1: (0x2CFD60A8084B5818, 0), 61: (0xB584C8B6C6768764, 0)}),
)  # fmt: skip


def broken(promise: Promise, step: int) -> list[str]:
    """What a sweep over every `step`-th block finds wrong, in words; `step` is one of `promise.digests`."""
    digest, error, worst, decreases, largest = _cpu.sweep(promise.code, 0, step)
    want_digest, want_decreases = promise.digests[step]
    wrong = []
    if error > promise.error:
        wrong.append(f"{promise.name}: error {error:.4f} at 0x{worst:08x}, promised {promise.error} ({promise.unit})")
    if decreases != want_decreases or largest > 1.0:
        wrong.append(f"{promise.name}: {decreases} decreases up to {largest} last places, known are {want_decreases}")
    if digest != want_digest:
        wrong.append(f"{promise.name}: digest {digest:016x}, recorded {want_digest:016x}: some output bits changed")
    return wrong


def main(step: int) -> int:
    failures = []
    for promise in PROMISES:
        found = broken(promise, step)
        failures += found
        print(
            f"{promise.name:12} {'BROKEN' if found else 'holds'}   error <= {promise.error} {promise.unit}", flush=True
        )
    for line in failures:
        print(line)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
