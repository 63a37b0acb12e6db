"""Drawing a token."""

from __future__ import annotations

from samebits.contract.boundaries.logprob import WINDOW_BITS, WINDOWS
from samebits.contract.boundary import Boundary

DRAW_BITS = 64

SAMPLE = Boundary(
    name="sample",
    version=1,
    dependency="the fp32 logits of one row, its temperature, seed and position; nothing else",
    partition="none: the terms of the order-free log-sum-exp (boundary logprob) are integers",
    merge=(
        "the four window sums are one exact integer S, in units of the lowest kept window; the token is the "
        "first id whose running total of terms, ids ascending, exceeds r"
    ),
    precision="integers throughout: a term is q << (i - 16 (top - 3)), dropped windows count as 0, S < 2^111",
    rounding=(
        "r = floor(S * R / 2^64), R the 64-bit number word1 * 2^32 + word0 of the generator. "
        "Temperature 0: the lowest id among the largest logits (-0 equals +0)"
    ),
    primitives=(
        "Philox4x32-10 (J. Salmon et al., 2011), key = seed as (low, high) words, "
        "counter = (position low, position high, 0, 0); terms as in logprob"
    ),
    specials="a row with NaN or +inf, or with nothing finite, has no distribution: the call is refused. A -inf beside "
    "finite logits is never drawn",
    constants={"window_bits": WINDOW_BITS, "windows": WINDOWS, "draw_bits": DRAW_BITS},
)
