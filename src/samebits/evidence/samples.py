"""What the samples of one step must have in common, whatever computed them. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise

from samebits.evidence.sidecar import StepSample

_POSITIVE = range(1, 0x7F800000)  # bit patterns of finite fp32 values above zero


def sample_problem(samples: Sequence[StepSample], vocabulary: int | None, strict: bool) -> str:
    """The first contradiction among a step's samples; empty where there is none.

    Samples of one prompt stand side by side. `vocabulary` bounds the ids where it is known; with `strict` the rollout's
    log-probabilities are the contract's, of which none is above zero.
    """
    for key, group in groupby(samples, key=lambda sample: sample.key.rpartition("/")[0]):
        problem = _group_problem(key, list(group))
        if problem:
            return problem
    for sample in samples:
        ids = (*sample.prompt_ids, *sample.token_ids)
        if vocabulary is not None and not 0 <= min(ids) <= max(ids) < vocabulary:
            return f"sample {sample.key}: ids from {min(ids)} to {max(ids)}, the contract's vocabulary has {vocabulary}"
        if strict and any(bits in _POSITIVE for bits in sample.rollout_bits):
            return f"sample {sample.key}: a log-probability is above 0"
    return ""


def _group_problem(key: str, group: Sequence[StepSample]) -> str:
    """One prompt's samples: the same prompt, and advantages that their rewards can have."""
    if any(list(sample.prompt_ids) != list(group[0].prompt_ids) for sample in group):
        return f"the samples of {key} have different prompts"
    by_reward = sorted((sample.reward, sample.advantage) for sample in group)
    for (reward, advantage), (next_reward, next_advantage) in pairwise(by_reward):
        if (reward < next_reward) != (advantage < next_advantage):
            return f"the samples of {key} have rewards {reward} and {next_reward} with advantages that order otherwise"
    largest = max(abs(sample.advantage) for sample in group)
    if abs(math.fsum(sample.advantage for sample in group)) > 1e-9 * largest * len(group):
        return f"the advantages of {key} do not add up to 0, as those of a group do"
    return ""
