"""How far the trainer's policy is from the one that sampled, over active tokens. Standard library only.

Every number comes from the two recorded bit patterns of a token, in float64 over tokens where both are finite, with
exact sums; a step without such a token has no numbers at all. log r is the trainer's log-probability minus the
rollout's.

logp_abs_diff_p50 ... p99.9   nearest rank: the smallest |log r| that so many per cent of the tokens do not exceed
ratio_min, ratio_mean, ratio_max
kl_k1, kl_k2, kl_k3           estimates of KL(rollout || trainer): -log r, (log r)^2 / 2, r - 1 - log r
clip_fraction                 tokens whose PPO term is clipped where the old policy is the rollout's: drift clips too
clip_fraction_corrected       ... where it is the trainer's own, recomputed before the update: with one update per batch
                              no token, as on-policy training should have it
is_truncated_fraction         tokens whose importance weight r truncated importance sampling would cut, at 2
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from samebits.evidence.compare import as_float

TRUNCATION = 2.0
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9}
_LARGEST = math.log(1.7e308)


def drift(samples: Iterable[tuple[Sequence[int], Sequence[int], float]], clip: float) -> tuple[int, dict[str, float]]:
    """(tokens measured, metrics) from (rollout bits, trainer bits, advantage) of each sample; ratios stay in 1 +- clip.

    The metrics are empty when no token has two finite values. All are finite: a ratio beyond float64 counts as its
    largest value. Raises ValueError when the two sides of a sample have different lengths.
    """
    logs: list[float] = []
    clipped = corrected = 0
    for rollout, trainer, advantage in samples:
        for left, right in zip(rollout, trainer, strict=True):
            log_ratio = as_float(right) - as_float(left)
            if not math.isfinite(log_ratio):
                continue
            logs.append(log_ratio)
            clipped += is_clipped(_ratio(log_ratio), advantage, clip)
            corrected += is_clipped(_ratio(as_float(right) - as_float(right)), advantage, clip)
    if not logs:
        return 0, {}
    ratios = [_ratio(value) for value in logs]
    sizes = sorted(abs(value) for value in logs)
    return len(logs), {
        **{f"logp_abs_diff_{name}": nearest_rank(sizes, per_cent) for name, per_cent in PERCENTILES.items()},
        "ratio_min": min(ratios),
        "ratio_mean": _mean(ratios),
        "ratio_max": max(ratios),
        "kl_k1": _mean([-value for value in logs]),
        "kl_k2": _mean([value * value / 2 for value in logs]),
        "kl_k3": _mean([_k3(value) for value in logs]),
        "clip_fraction": clipped / len(logs),
        "clip_fraction_corrected": corrected / len(logs),
        "is_truncated_fraction": sum(ratio > TRUNCATION for ratio in ratios) / len(logs),
    }


def is_clipped(ratio: float, advantage: float, clip: float) -> bool:
    """Whether PPO's clipped term is the smaller one, so that the token gives no gradient."""
    return (advantage > 0 and ratio > 1 + clip) or (advantage < 0 and ratio < 1 - clip)


def nearest_rank(ascending: Sequence[float], per_cent: float) -> float:
    """The smallest value that `per_cent` of the values do not exceed."""
    rank = math.ceil(per_cent / 100 * len(ascending) - 1e-9)
    return ascending[max(rank, 1) - 1]


def _ratio(log_ratio: float) -> float:
    return math.exp(min(log_ratio, _LARGEST))


def _k3(log_ratio: float) -> float:
    # expm1 keeps the digits that exp(x) - 1 loses where x is small: k3 is about x^2 / 2 there.
    return math.expm1(min(log_ratio, _LARGEST)) - log_ratio


def _mean(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values)


_OPERATORS: dict[str, Callable[[Iterable[float]], float]] = {"ratio_min": min, "ratio_max": max}


def merged(parts: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """The metrics over several steps or ranks from those of each with its tokens: means weighted by tokens, extremes by
    min and max. Percentiles do not follow from percentiles, so they are left out; so is what one of the parts lacks."""
    filled = [(tokens, metrics) for tokens, metrics in parts if tokens > 0]
    total = sum(tokens for tokens, _ in filled)
    found = {}
    for name in filled[0][1] if filled else ():
        if name.startswith("logp_abs_diff_") or any(name not in metrics for _, metrics in filled):
            continue
        if name in _OPERATORS:
            found[name] = _OPERATORS[name](metrics[name] for _, metrics in filled)
        else:
            found[name] = math.fsum(metrics[name] * (tokens / total) for tokens, metrics in filled)
    return found


def agrees(claimed: Mapping[str, float], found: Mapping[str, float]) -> str | None:
    """The first name under which two sets of metrics differ. Another machine's exp may differ in its last digits."""
    for name in (*found, *claimed):
        left, right = claimed.get(name), found.get(name)
        if left is None or right is None or not math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-15):
            return name
    return None
