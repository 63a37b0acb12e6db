"""Putting a run on record while it happens: every event goes to the ledger first, then to whoever watches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from samebits.evidence.compare import Comparison, compare
from samebits.evidence.drift import drift
from samebits.evidence.encode import encode_step
from samebits.evidence.routes import process_name
from samebits.evidence.sidecar import StepSample, sidecar_name
from samebits.evidence.store import ROUTES, SUMMARY, TIMELINE, RunDirectory
from samebits.evidence.summary import summarise
from samebits.timeline.events import Compared, Event, Measured, Published, RunFinished, Sampled
from samebits.timeline.ledger import Ledger
from samebits.timeline.types import Rollout, WeightVersion

Watcher = Callable[[Event], None]


class Recorder:
    """Writes one run into its directory. `seal` closes it; one that stops earlier stays readable."""

    def __init__(self, run: RunDirectory, watch: Watcher = lambda event: None) -> None:
        self.run = run
        self.events: list[Event] = []
        self._watch = watch
        self._ledger = Ledger(run.path / TIMELINE)

    def add(self, event: Event) -> None:
        """Appends one event. Raises OSError when the disk refuses it."""
        self._ledger.append(event)
        self.events.append(event)
        self._watch(event)

    def published(self, version: WeightVersion, contract: str, parameters: int, engines: int, seconds: float) -> None:
        self.add(
            Published(
                version=version.counter,
                digest=version.digest,
                contract=contract,
                parameters=parameters,
                engines=engines,
                seconds=seconds,
            )
        )

    def sampled(self, rollouts: Sequence[Rollout], rewards: Sequence[float], advantages: Sequence[float]) -> None:
        """One line per response, in the order in which the step's sidecar will hold them."""
        start = 0
        for rollout, reward, advantage in zip(rollouts, rewards, advantages, strict=True):
            self.add(
                Sampled(
                    step=rollout.key.step,
                    prompt=rollout.key.prompt,
                    sample=rollout.key.sample,
                    engine=rollout.engine,
                    start=start,
                    prompt_length=len(rollout.prompt_ids),
                    response_length=len(rollout.token_ids),
                    version=rollout.version.counter,
                    digest=rollout.version.digest,
                    contract=rollout.contract,
                    finish_reason=rollout.finish_reason,
                    reward=reward,
                    advantage=advantage,
                )
            )
            start += len(rollout.prompt_ids) + len(rollout.token_ids)

    def compared(self, step: int, version: int, samples: Sequence[StepSample], clip: float) -> Comparison:
        """Writes the step's sidecar, compares and measures its two log-probabilities and records the results."""
        name = sidecar_name(step)
        digest = self.run.write(name, encode_step(samples))
        result = compare((sample.key, sample.rollout_bits, sample.trainer_bits) for sample in samples)
        self.add(
            Compared(
                step=step,
                version=version,
                sidecar=name,
                sidecar_sha256=digest,
                compared_tokens=result.compared_tokens,
                mismatch_count=result.mismatch_count,
                nonfinite_count=result.nonfinite_count,
                max_abs_diff=result.max_abs_diff,
                mean_abs_diff=result.mean_abs_diff,
                worst=str(result.worst) if result.worst else None,
            )
        )
        tokens, metrics = drift(((s.rollout_bits, s.trainer_bits, s.advantage) for s in samples), clip)
        self.add(Measured(step=step, version=version, tokens=tokens, metrics=metrics))
        self._ledger.sync()
        return result

    def seal(self, steps: int, routes: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Writes what remains and the seal last; returns the summary."""
        self.add(RunFinished(steps=steps))
        self._ledger.sync()
        self.close()
        for record in routes:
            self.run.write_json(f"{ROUTES}/{process_name(record)}.json", record)
        summary = summarise(self.events)
        self.run.write_json(SUMMARY, summary)
        self.run.seal(manifest)
        return summary

    def close(self) -> None:
        self._ledger.close()
