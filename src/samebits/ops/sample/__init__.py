"""Drawing tokens exactly: an integer below the sum of all terms picks the term it falls into.

The terms are those of the order-free log-sum-exp, so a draw depends on the bits of the logits, the
temperature, the seed and the position, and on nothing else.
"""

from __future__ import annotations

import torch

from samebits.backends import lazy, pick
from samebits.ops.logprob.rows import Temperature, check_ids, check_logits, check_temperature
from samebits.ops.sample.contract import SAMPLE as SAMPLE
from samebits.ops.sample.reference import NO_TOKEN as NO_TOKEN

BACKENDS = lazy("samebits.ops.sample", "cpu", "reference", "triton")


def sample(
    logits: torch.Tensor,
    temperature: Temperature,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    backend: str | None = None,
) -> torch.Tensor:
    """One token per row of logits fp32 [T, V], drawn from softmax(logits / temperature): int64 [T].

    Row i uses the random bits of (seeds[i], positions[i]), both int64 [T]. Temperature 0 takes the lowest id
    among the largest logits. Raises ValueError on a row with NaN or +inf, or with nothing finite.
    """
    return sample_and_logprob(logits, temperature, seeds, positions, backend)[0]


def sample_and_logprob(
    logits: torch.Tensor,
    temperature: Temperature,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample`, and the fp32 log-probability [T] of each drawn token: the bits that `logprob` gives.

    At temperature 0 the log-probability is that of temperature 1.
    """
    rows = logits.shape[0]
    check_logits("sample", logits)
    check_temperature("sample", temperature, rows, zero=True)
    for name, ids in (("seeds", seeds), ("positions", positions)):
        check_ids("sample", name, ids, rows)
    impl = pick("sample", BACKENDS, backend, logits, seeds, positions)
    tokens, logp = impl.sample_and_logprob(logits, temperature, seeds, positions)
    if rows and int(tokens.min()) == NO_TOKEN:
        row = int((tokens == NO_TOKEN).nonzero()[0])
        raise ValueError(f"sample: row {row} has no distribution: it holds NaN or +inf, or nothing finite")
    return tokens, logp


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample_and_logprob` for a caller that must not wait for the device: no value is looked at.

    A row without a distribution gives the token NO_TOKEN; temperatures are the caller's to check.
    """
    check_logits("draw", logits)
    drawn: tuple[torch.Tensor, torch.Tensor] = pick("sample", BACKENDS, None, logits).sample_and_logprob(
        logits, temperature, seeds, positions
    )
    return drawn
