"""The two sides as the loop sees them. Each runs in processes of its own; neither is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from samebits.timeline.types import (
    GenerateRequest,
    Part,
    Rollout,
    ShardDigest,
    StepResult,
    TrainSample,
    WeightVersion,
)

if TYPE_CHECKING:
    from samebits.trace import Entry


class RunFailed(RuntimeError):
    """The run cannot go on and can prove nothing: the message says what happened, to whom, and what to do."""


class RolloutSide(Protocol):
    """All rollout engines together."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Rollout]:
        """One response per request, in the order of the requests."""

    def publish(self, path: str, version: WeightVersion) -> list[list[ShardDigest]]:
        """Loads the weights under `path` in every engine; per engine, the digests of what it now holds."""

    def watch(self, traced: Mapping[int, int]) -> None:
        """Record points of the next requests: number of a request -> its last index of interest."""

    def watched(self) -> list[list[Entry]]:
        """Stop recording; what each worker process recorded."""

    def proof(self) -> list[dict[str, Any]]:
        """One route record per worker process."""


class TrainerSide(Protocol):
    """All trainer ranks together."""

    def train_step(self, step: int, samples: Sequence[TrainSample]) -> StepResult:
        """Scores the samples with its own forward, then takes one optimiser step on them."""

    def export(self, path: str) -> Mapping[str, str]:
        """Writes the weights under Hugging Face names into `path`; the digest of each parameter."""

    def save(self, path: str) -> None:
        """Writes the weights under Hugging Face names into the folder `path`."""

    def lent_digests(self, parts: Sequence[Part]) -> list[str]:
        """The digests of parts of the exported parameters, where those were lent instead of written."""

    def watch(self, traced: Mapping[int, int]) -> None:
        """Record points of the next training step: number of a sample -> its last index of interest."""

    def watched(self) -> list[list[Entry]]:
        """Stop recording; what each rank recorded."""

    def proof(self) -> list[dict[str, Any]]:
        """One route record per rank."""
