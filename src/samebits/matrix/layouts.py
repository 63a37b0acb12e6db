"""Starting one layout: its processes, one after the other in time, and what they say about the shared tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.contract import RunContract, digest_of
from samebits.matrix.scores import Scores, merge_ranks, of_rollouts
from samebits.rl.chat import ChatTokenizer
from samebits.rl.checks import check_contracts, check_rollouts
from samebits.rl.config import RunConfig
from samebits.rl.inputs import Inputs, stop_ids
from samebits.rl.job import Parts
from samebits.rl.loop import draw_seed
from samebits.rl.processes import Group, close
from samebits.rl.prompts import PromptSet
from samebits.rl.sides import RolloutGroup, TrainerGroup
from samebits.scratch import scratch_folder
from samebits.timeline.types import GenerateRequest, Rollout, SampleKey, TrainSample


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What all layouts share."""

    parts: Parts
    inputs: Inputs
    contract: RunContract
    logs: Path


def requests_of(config: RunConfig, inputs: Inputs) -> list[GenerateRequest]:
    """The requests of the first step of the job: the same for every layout."""
    prompts = PromptSet(inputs.prompts, ChatTokenizer(inputs.model), config.max_prompt_length)
    ends = stop_ids(inputs.model)
    keyed = (
        (SampleKey(1, prompt.index, sample), prompt)
        for prompt in prompts.batch(1, config.prompts_per_step, config.seed)
        for sample in range(config.samples_per_prompt)
    )
    return [
        GenerateRequest(
            key=key,
            prompt_ids=prompt.token_ids,
            seed=draw_seed(config.rollout_seed, key),
            max_tokens=config.max_response_length,
            temperature=config.temperature,
            stop_ids=ends,
        )
        for key, prompt in keyed
    ]


def generate(shared: Shared, name: str, config: RunConfig, requests: Sequence[GenerateRequest]) -> list[Rollout]:
    """What the engines of one rollout layout draw for the requests, and score meanwhile."""
    arguments = [
        shared.parts.engine_arguments(config, shared.inputs, shared.contract, index)
        for index in range(config.rollout_engines)
    ]
    group = Group([f"rollout {name} engine {index}" for index in range(config.rollout_engines)], shared.logs)
    with _ending(group):
        group.gather("start", group.start(shared.parts.engine, arguments), config.start_timeout)
        engines = RolloutGroup(group, config.step_timeout)
        rollouts = engines.generate(requests)
        check_rollouts(requests, rollouts, rollouts[0].version, shared.contract.digest())
        check_contracts(engines.proof(), config.cases, shared.contract)
        close(group)
    return rollouts


def score_rollouts(
    shared: Shared, name: str, config: RunConfig, requests: Sequence[GenerateRequest]
) -> tuple[Scores, list[Rollout]]:
    began = time.monotonic()
    rollouts = generate(shared, name, config, requests)
    return of_rollouts(rollouts, config.rollout_engines * config.rollout_tp, time.monotonic() - began), rollouts


class TrainerPool:
    """Processes that serve one trainer layout after the other: only the first one pays for their start."""

    def __init__(self, shared: Shared, ranks: int) -> None:
        self._shared = shared
        self._group = Group([f"trainer of {ranks} rank {rank}" for rank in range(ranks)], shared.logs)

    def score(self, config: RunConfig, samples: Sequence[TrainSample], tokens: dict[str, Any], steps: int) -> Scores:
        """Scores the samples, then takes optimiser steps on them. Raises RunFailed."""
        began, group = time.monotonic(), self._group
        with scratch_folder() as scratch:
            arguments = [
                self._shared.parts.trainer_arguments(config, self._shared.inputs, self._shared.contract, rank, scratch)
                for rank in range(config.trainer_ranks)
            ]
            group.gather("start", group.start(self._shared.parts.trainer, arguments), config.start_timeout)
            trainer = TrainerGroup(group, config.step_timeout)
            scored = group.everyone("score", list(samples), timeout=config.step_timeout)
            bits = merge_ranks(scored, samples)
            taken = [_step(trainer, number, samples, scratch) for number in range(1, steps + 1)]
            check_contracts(trainer.proof(), config.cases, self._shared.contract)
            group.everyone("close", timeout=config.step_timeout)
        seconds = time.monotonic() - began
        return Scores(tokens=tokens, bits=bits, processes=config.trainer_ranks, seconds=seconds, steps=taken)

    def close(self) -> None:
        self._group.kill()


def _step(trainer: TrainerGroup, number: int, samples: Sequence[TrainSample], scratch: Path) -> dict[str, Any]:
    result = trainer.train_step(number, samples)
    path = scratch / f"v{number}"
    path.mkdir()
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "logp": digest_of([[str(key), list(bits)] for key, bits in sorted(result.logp_bits.items())]),
        "weights": digest_of(dict(trainer.export(str(path)))),
    }


@contextmanager
def _ending(group: Group) -> Iterator[None]:
    try:
        yield
    finally:
        group.kill()
