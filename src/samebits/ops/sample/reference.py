"""The definition of a draw, with whole numbers of Python."""

from __future__ import annotations

import torch

from samebits.ops.logprob import reference as logprob_reference
from samebits.ops.logprob.contract import TOP_LIMIT, WINDOW_BITS, WINDOWS
from samebits.ops.logprob.rows import Temperature
from samebits.ops.sample.contract import DRAW_BITS

NO_TOKEN = -1  # of a row without a distribution

_MASK = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words: Philox4x32 with 10 rounds."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (right >> 32) ^ b ^ k0, right & _MASK, (left >> 32) ^ d ^ k1, left & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return a, b, c, d


def random_bits(seed: int, position: int) -> int:
    """R: 64 random bits that depend on the 64-bit patterns of seed and position only."""
    words = philox((position & _MASK, (position >> 32) & _MASK, 0, 0), (seed & _MASK, (seed >> 32) & _MASK))
    return words[1] << 32 | words[0]


def draw(q: list[int], i: list[int], top: int, bits: int) -> int:
    """The first id whose running total exceeds floor(S * bits / 2^64)."""
    lowest = top - (WINDOWS - 1)
    weights = [
        significand << (exponent - WINDOW_BITS * lowest) if exponent // WINDOW_BITS >= lowest else 0
        for significand, exponent in zip(q, i, strict=True)
    ]
    rest = (sum(weights) * bits) >> DRAW_BITS
    for token, weight in enumerate(weights):
        rest -= weight
        if rest < 0:
            return token
    raise AssertionError("r < S, so some running total exceeds it")


def greedy(logits: torch.Tensor) -> int:
    """The lowest id among the largest of logits [V]."""
    return int((logits == logits.max()).nonzero()[0])


def sample_and_logprob(
    logits: torch.Tensor, temperature: Temperature, seeds: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [T] (NO_TOKEN where a row has no distribution) and their log-probabilities fp32 [T]."""
    rows = logits.shape[0]
    temps = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).expand(rows)
    positive = torch.where(temps == 0, 1.0, temps)
    q, i = logprob_reference.terms(logprob_reference.scaled(logits, positive))
    top = logprob_reference.state(logits, positive)[:, 0]
    tokens = []
    for row in range(rows):
        if not -TOP_LIMIT <= int(top[row]) < TOP_LIMIT:
            tokens.append(NO_TOKEN)
        elif temps[row] == 0:
            tokens.append(greedy(logits[row]))
        else:
            bits = random_bits(int(seeds[row]), int(positions[row]))
            tokens.append(draw(q[row].tolist(), i[row].tolist(), int(top[row]), bits))
    chosen = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    return chosen, logprob_reference.logprob(logits, chosen[:, None], positive)[:, 0]
