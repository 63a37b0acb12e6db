"""The tokens of a finished run, to be produced again: one run's work for another route, layout or machine."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from samebits.evidence.sidecar import StepSample, read_step, sidecar_name
from samebits.evidence.store import SEAL
from samebits.evidence.verify import verify
from samebits.rl.config import RunConfig
from samebits.rl.prompts import PromptSet
from samebits.timeline.types import GenerateRequest, Prompt, SampleKey


class RecordedTokens:
    """Responses of a sealed run, by step and sample."""

    def __init__(self, run: Path, config: RunConfig, prompts: PromptSet) -> None:
        """Raises ValueError for a run whose records do not hold, or do not have what the steps of `config` need."""
        if not (run / SEAL).is_file():
            raise ValueError(f"replay_tokens: {run} is no finished run: {SEAL} is missing")
        found = verify(run)
        if found.problems:
            raise ValueError(f"replay_tokens: the records of {run} do not hold: {found.problems[0]}")
        if found.totals["steps"] < config.num_rollout:
            raise ValueError(
                f"replay_tokens: {run} holds {found.totals['steps']} steps, num_rollout is {config.num_rollout}"
            )
        self._run = run
        for step in range(1, config.num_rollout + 1):
            self._check(step, prompts.batch(step, config.prompts_per_step, config.seed), config)

    def _check(self, step: int, prompts: Sequence[Prompt], config: RunConfig) -> None:
        recorded = self._samples(step)
        for prompt, number in itertools.product(prompts, range(config.samples_per_prompt)):
            key = str(SampleKey(step, prompt.index, number))
            sample = recorded.get(key)
            if sample is None or tuple(sample.prompt_ids) != prompt.token_ids:
                raise ValueError(
                    f"replay_tokens: sample {key} has no recorded response to this prompt in {self._run}; "
                    "use the same prompts, seed and batch size"
                )
            if len(sample.token_ids) > config.max_response_length:
                raise ValueError(
                    f"replay_tokens: sample {key} has {len(sample.token_ids)} recorded tokens, at most "
                    f"{config.max_response_length} fit; raise max_response_length"
                )

    def forced(self, step: int, requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
        """The requests of one step with the recorded tokens of their samples."""
        recorded = self._samples(step)
        tokens = [tuple(recorded[str(request.key)].token_ids) for request in requests]
        return [
            dataclasses.replace(request, forced=ids, max_tokens=len(ids))
            for request, ids in zip(requests, tokens, strict=True)
        ]

    def _samples(self, step: int) -> dict[str, StepSample]:
        return {sample.key: sample for sample in read_step(self._run / sidecar_name(step))}
