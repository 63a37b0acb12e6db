"""GRPO advantages: rewards normalised inside each prompt's group, in Python float64 and in sample order."""

from __future__ import annotations

import math
from collections.abc import Sequence

EPSILON = 1e-6


def group_advantages(rewards: Sequence[float]) -> tuple[float, ...]:
    """(reward - mean) / (std + 1e-6) over one group, with the population's standard deviation.

    A group whose rewards are all equal teaches nothing: its advantages are exactly 0.0. Raises ValueError
    for an empty group or a reward that is not finite.
    """
    if not rewards:
        raise ValueError("group_advantages: an empty group of rewards, want at least one")
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"group_advantages: rewards must be finite, got {list(rewards)}")
    if all(reward == rewards[0] for reward in rewards):
        return (0.0,) * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    deviations = [reward - mean for reward in rewards]
    std = math.sqrt(math.fsum(deviation * deviation for deviation in deviations) / len(rewards))
    return tuple(deviation / (std + EPSILON) for deviation in deviations)
