"""Log-probabilities of tokens, from logits or straight from hidden states and the LM head's weight.

The log-sum-exp behind them is order-free: each logit's exponential is an integer at an exponent, and integers
add up to the same sum however the vocabulary is tiled, split over ranks, permuted or padded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samebits.backends import pick
from samebits.ops.logprob import reference
from samebits.ops.logprob.contract import LOGPROB as LOGPROB
from samebits.ops.logprob.contract import MAX_SUM, WINDOWS
from samebits.ops.logprob.head import BACKENDS
from samebits.ops.logprob.head import linear_logp as linear_logp
from samebits.ops.logprob.rows import Temperature, check_ids, check_logits, check_temperature


def logprob(
    logits: torch.Tensor, targets: torch.Tensor, temperature: Temperature = 1.0, backend: str | None = None
) -> torch.Tensor:
    """log softmax(logits / temperature) at `targets`: fp32, shaped like targets.

    logits fp32 [T, V], targets int64 [T] or [T, N]. A target that is no column (negative, or >= V) gives +0.
    A row with NaN or +inf gives NaN. Raises ValueError on other dtypes or shapes and on a temperature that
    isn't positive.
    """
    check_logits("logprob", logits)
    check_ids("logprob", "targets", targets, logits.shape[0], axes=(1, 2))
    check_temperature("logprob", temperature, logits.shape[0])
    impl = pick("logprob", BACKENDS, backend, logits, targets)
    return impl.logprob(logits, targets[:, None] if targets.ndim == 1 else targets, temperature).view(targets.shape)


def score(logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """`logprob` of one target [T] a row for a caller that must not wait for the device: no value is looked at.

    Temperatures fp32 [T] are the caller's to check.
    """
    check_logits("score", logits)
    check_ids("score", "targets", targets, logits.shape[0])
    scored: torch.Tensor = pick("logprob", BACKENDS, None, logits, targets).logprob(
        logits, targets[:, None], temperature
    )
    return scored[:, 0]


def lse_state(logits: torch.Tensor, temperature: Temperature = 1.0, backend: str | None = None) -> torch.Tensor:
    """The order-free state of each row of logits fp32 [T, V]: int64 [T, 5], top window and 4 window sums."""
    check_logits("lse_state", logits)
    check_temperature("lse_state", temperature, logits.shape[0])
    return pick("logprob", BACKENDS, backend, logits).state(logits, temperature)


def merge_states(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """States [T, 5] of parts of the vocabulary -> the state of the whole, whatever the parts and their order.

    Raises ValueError when a window sum leaves its 62 bits (more than 2^22 terms).
    """
    if not states:
        raise ValueError("merge_states: got no states")
    total = states[0]
    for state in states[1:]:
        total = reference.merge(total, state)
        if bool((total[:, 1:] >= MAX_SUM).any()):
            raise ValueError("merge_states: a window sum needs more than 62 bits; the parts hold too many terms")
    return total


def finish(states: torch.Tensor, backend: str | None = None) -> torch.Tensor:
    """States [T, 5] -> log-sum-exp fp32 [T]: -inf for a row of -inf, NaN for a row with NaN or +inf."""
    _check_states("finish", states)
    return pick("logprob", BACKENDS, backend, states).lse(states.contiguous())


def finish_logp(states: torch.Tensor, z: torch.Tensor, backend: str | None = None) -> torch.Tensor:
    """States [T, 5] and already scaled logits z fp32 [T] of the targets -> logp fp32 [T]."""
    _check_states("finish_logp", states)
    if z.dtype != torch.float32 or z.shape != states.shape[:1]:
        raise ValueError(f"finish_logp: z must be float32 [{len(states)}], got {z.dtype} {list(z.shape)}")
    return pick("logprob", BACKENDS, backend, states, z).finish(states.contiguous(), z.contiguous()[:, None])[:, 0]


def _check_states(op: str, states: torch.Tensor) -> None:
    if states.dtype != torch.int64 or states.shape[1:] != (1 + WINDOWS,):
        raise ValueError(f"{op}: states must be int64 [T, {1 + WINDOWS}], got {states.dtype} {list(states.shape)}")
