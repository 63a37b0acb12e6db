"""The tokens of a finished run, to be produced again: one run's work for another route, layout or machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from samebits.evidence.sidecar import read_step, sidecar_name
from samebits.evidence.store import SEAL
from samebits.evidence.verify import verify
from samebits.rl.config import RunConfig
from samebits.rl.protocols import RunFailed
from samebits.timeline.types import GenerateRequest


class RecordedTokens:
    """Responses of a sealed run, by step and sample."""

    def __init__(self, run: Path, config: RunConfig) -> None:
        """Raises ValueError for a run whose records do not hold or that has too few steps."""
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

    def forced(self, step: int, requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
        """The requests with the recorded tokens of their samples. RunFailed where the run held other prompts."""
        recorded = {sample.key: sample for sample in read_step(self._run / sidecar_name(step))}
        found = []
        for request in requests:
            sample = recorded.get(str(request.key))
            if sample is None or tuple(sample.prompt_ids) != request.prompt_ids:
                raise RunFailed(
                    f"replay_tokens: sample {request.key} has no recorded response to this prompt in {self._run}; "
                    "use the same prompts, seed and batch size"
                )
            if len(sample.token_ids) > request.max_tokens:
                raise RunFailed(
                    f"replay_tokens: sample {request.key} has {len(sample.token_ids)} recorded tokens, at most "
                    f"{request.max_tokens} fit; raise max_response_length"
                )
            tokens = tuple(sample.token_ids)
            found.append(dataclasses.replace(request, forced=tokens, max_tokens=len(tokens)))
        return found
