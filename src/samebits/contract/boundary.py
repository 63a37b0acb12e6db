"""The six behaviours of one boundary, as data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from hashlib import sha256


def canonical_json(data: object) -> str:
    """JSON with sorted keys and no spaces: equal data gives equal text, so its digest is a name."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest_of(data: object) -> str:
    """SHA-256 (hex) of the canonical JSON of `data`."""
    return sha256(canonical_json(data).encode()).hexdigest()


BEHAVIOURS = ("dependency", "partition", "merge", "precision", "rounding", "primitives")


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """What one operator promises: the same values, partitioned, merged and rounded the same way everywhere.

    A schedule (tiles, threads, batch, pages, ranks) is no part of it. Any change that can move an output
    bit needs a new `version`.
    """

    name: str
    version: int
    dependency: str  # which elements an output depends on: the reduction domain
    partition: str  # how the reduction domain is cut
    merge: str  # in which order the parts combine
    precision: str  # of inputs, accumulators, intermediate states and outputs
    rounding: str  # the exact places where a value is rounded to a smaller type
    primitives: str  # which elementary operations are used
    specials: str  # what NaN, infinities, subnormal numbers, signed zeros and masked places give
    constants: dict[str, int | str] = field(default_factory=dict)  # numbers that kernels must share

    def __post_init__(self) -> None:
        if self.version < 1:
            raise ValueError(f"boundary {self.name}: version must be >= 1, got {self.version}")

    @property
    def id(self) -> str:
        return f"{self.name}@{self.version}"

    def as_data(self) -> dict[str, object]:
        return asdict(self)

    def digest(self) -> str:
        return digest_of(self.as_data())
