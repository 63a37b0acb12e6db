"""The two sides of a session as groups of processes: every process is asked, and all answers come back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from samebits.locate.session import Answer
from samebits.timeline.types import SampleKey, ShardDigest, TrainSample
from samebits.trace import TracedSequence


class Processes(Protocol):
    """What a group of hosted processes can do (`samebits.rl.processes.Group`)."""

    hosts: list[Any]

    def everyone(self, method: str, *args: Any, timeout: float) -> list[Any]: ...

    def gather(self, doing: str, pending: Sequence[Future[Any]], timeout: float) -> list[Any]: ...


class TrainerHosts:
    """All ranks of a trainer; each computes its share of all samples."""

    def __init__(self, group: Processes, timeout: float) -> None:
        self._group, self._timeout = group, timeout

    def trace(
        self, sequences: Sequence[TracedSequence], traced: Mapping[int, int], keep: Collection[tuple[int, str]]
    ) -> list[Answer]:
        samples = [as_sample(number, sequence) for number, sequence in enumerate(sequences)]
        return self._group.everyone("trace", samples, dict(traced), list(keep), timeout=self._timeout)

    def export(self, path: str) -> Mapping[str, str]:
        answers = self._group.everyone("export", path, timeout=self._timeout)
        return next(answer for answer in answers if answer)


class RolloutHosts:
    """One engine of a group; it answers for all of its workers."""

    def __init__(self, group: Processes, timeout: float, engine: int = 0) -> None:
        self._group, self._timeout, self._engine = group, timeout, engine

    def trace(
        self, sequences: Sequence[TracedSequence], traced: Mapping[int, int], keep: Collection[tuple[int, str]]
    ) -> list[Answer]:
        return self._ask("trace", list(sequences), dict(traced), list(keep))

    def live_shards(self) -> list[ShardDigest]:
        return self._ask("live_shards")

    def weight(self, name: str) -> list[tuple[int, int, np.ndarray[Any, Any]]]:
        return self._ask("weight", name)

    def _ask(self, method: str, *args: Any) -> Any:
        (answer,) = self._group.gather(method, [self._group.hosts[self._engine].call(method, *args)], self._timeout)
        return answer


def as_sample(number: int, sequence: TracedSequence) -> TrainSample:
    """A sequence as the trainer receives one, with nothing to learn from."""
    response = len(sequence.token_ids) - sequence.prompt_length
    return TrainSample(SampleKey(0, number, 0), sequence.token_ids, sequence.prompt_length, 0.0, (0,) * response)
