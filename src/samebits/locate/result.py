"""What localisation found, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from samebits.evidence.verdict import Verdict
from samebits.locate.values import RowDifference
from samebits.locate.weights import WeightDifference
from samebits.trace.points import ENDS

SCHEMA = "samebits.locate/1"
Kind = Literal[
    "operator", "weights", "input ids", "position ids", "target ids", "temperature", "dtype", "parameter", "KV cache",
    "ranks", "region",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Where:
    """The site, the sequence and the index of the token in it; `region` when the site is only the last of several."""

    site: str
    layer: int
    boundary: str
    group: str
    sequence: str
    index: int
    tokens_differing: int
    tokens_compared: int
    region: tuple[str, ...]

    def __str__(self) -> str:
        layer = "" if self.site in ENDS else f" of layer {self.layer}"
        return f"{self.site}{layer}, token {self.index} of sample {self.sequence}"


@dataclass(frozen=True, kw_only=True)
class SideFacts:
    """One side at the located site: route, code, parameters; whether it gave the contract's bits (None: unknown)."""

    route: str
    implementation: str
    parameters: dict[str, Any]
    gives_the_contract: bool | None


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Of the recorded log-probabilities of the traced sample, how many came out again, and of how many."""

    rollout: int
    trainer: int
    recorded: int


@dataclass(frozen=True, kw_only=True)
class Located:
    """The answer. `kind` says what sort of difference it is, `hints` what else was noticed about it.

    `in_the_run` is what the traces say that the run itself kept of this step (`--trace-tokens`).
    """

    verdict: Verdict
    summary: str
    kind: Kind | None = None
    where: Where | None = None
    trainer: SideFacts | None = None
    rollout: SideFacts | None = None
    differences: tuple[RowDifference, ...] = ()
    weight: WeightDifference | None = None
    hints: tuple[str, ...] = ()
    points_compared: int = 0
    tokens_compared: int = 0
    not_compared: tuple[str, ...] = ()
    replayed: Replayed | None = None
    in_the_run: str | None = None
    repro: str | None = None

    def as_data(self) -> dict[str, Any]:
        """For JSON; the verdict as its word."""
        return {"schema": SCHEMA, **asdict(self), "verdict": self.verdict.value}
