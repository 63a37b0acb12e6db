"""The rollout side and the trainer side as groups of processes, behind the loop's two Protocols."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from samebits.rl.processes import Group
from samebits.rl.protocols import RunFailed
from samebits.timeline.types import (
    GenerateRequest,
    Part,
    Rollout,
    SampleKey,
    ShardDigest,
    StepResult,
    TrainSample,
    WeightVersion,
)

if TYPE_CHECKING:
    from samebits.trace import Entry


class RolloutGroup:
    """Rollout engines that share the requests: each gets one run of them, and the runs are equally long.

    Where prompts divide over engines, a prompt's responses stay on one.
    """

    def __init__(self, group: Group, timeout: float) -> None:
        self.group = group
        self.timeout = timeout

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Rollout]:
        engines = len(self.group.hosts)
        bounds = [math.ceil(number * len(requests) / engines) for number in range(engines + 1)]
        shares = [list(requests[start:stop]) for start, stop in pairwise(bounds)]
        pending = [host.call("generate", share) for host, share in zip(self.group.hosts, shares, strict=True)]
        answers = self.group.gather("generate", pending, self.timeout)
        found: dict[SampleKey, Rollout] = {}
        for rollout in (rollout for answer in answers for rollout in answer):
            if rollout.key in found:
                raise RunFailed(f"sample {rollout.key} came back twice from the rollout engines")
            found[rollout.key] = rollout
        missing = [request.key for request in requests if request.key not in found]
        if missing or len(found) != len(requests):
            raise RunFailed(
                f"the rollout engines returned {len(found)} samples for {len(requests)} requests; "
                f"missing: {', '.join(map(str, missing[:4])) or 'none'}"
            )
        return [found[request.key] for request in requests]

    def publish(self, path: str, version: WeightVersion) -> list[list[ShardDigest]]:
        return self.group.everyone("publish", path, version, timeout=self.timeout)

    def watch(self, traced: Mapping[int, int]) -> None:
        # the first request goes to the first engine, and is the first there
        self.group.first("watch", dict(traced), timeout=self.timeout)

    def watched(self) -> list[list[Entry]]:
        entries: list[list[Entry]] = self.group.first("watched", timeout=self.timeout)
        return entries

    def proof(self) -> list[dict[str, Any]]:
        answers = self.group.everyone("proof", timeout=self.timeout)
        return [record for answer in answers for record in answer]


class TrainerGroup:
    """Trainer ranks in lockstep. Every rank gets all samples and splits them by its own coordinates."""

    def __init__(self, group: Group, timeout: float) -> None:
        self.group = group
        self.timeout = timeout

    def train_step(self, step: int, samples: Sequence[TrainSample]) -> StepResult:
        results = self.group.everyone("train_step", step, list(samples), timeout=self.timeout)
        return merge_results(results)

    def export(self, path: str) -> Mapping[str, str]:
        digests: list[Mapping[str, str]] = [
            found for found in self.group.everyone("export", path, timeout=self.timeout) if found
        ]
        if not digests or any(found != digests[0] for found in digests):
            raise RunFailed("the trainer ranks disagree about the digests of the exported weights")
        return digests[0]

    def save(self, path: str) -> None:
        self.group.everyone("save", path, timeout=self.timeout)

    def lent_digests(self, parts: Sequence[Part]) -> list[str]:
        return list(self.group.first("lent_digests", list(parts), timeout=self.timeout))

    def watch(self, traced: Mapping[int, int]) -> None:
        self.group.everyone("watch", dict(traced), timeout=self.timeout)

    def watched(self) -> list[list[Entry]]:
        return self.group.everyone("watched", timeout=self.timeout)

    def proof(self) -> list[dict[str, Any]]:
        return self.group.everyone("proof", timeout=self.timeout)


def merge_results(results: Sequence[StepResult]) -> StepResult:
    """One result from all ranks: the first's scalars, everybody's log-probabilities, which must agree."""
    merged: dict[SampleKey, tuple[int, ...]] = {}
    for rank, result in enumerate(results):
        for key, bits in result.logp_bits.items():
            if merged.setdefault(key, bits) != bits:
                raise RunFailed(f"trainer rank {rank} computed other log-probabilities for sample {key}")
    return dataclasses.replace(results[0], logp_bits=merged)
