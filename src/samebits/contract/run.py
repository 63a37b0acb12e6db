"""The contract of a whole run: what trainer and rollout engine compare before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from samebits.contract.boundary import Boundary, digest_of

ARITHMETICS = ("fma32", "sm90", "cdna3")


@dataclass(frozen=True, kw_only=True)
class RunContract:
    """Everything that fixes the bits of a run besides weights and tokens.

    `segments` is the number of K segments of row-parallel weights: the largest tensor-parallel degree that
    either side may use. `model` names the model's own constants (epsilon, rotary base, scale ...).
    """

    arithmetic: str
    segments: int
    boundaries: tuple[Boundary, ...]
    model: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.arithmetic not in ARITHMETICS:
            raise ValueError(f"arithmetic must be one of {', '.join(ARITHMETICS)}, got {self.arithmetic!r}")
        if self.segments < 1 or self.segments & (self.segments - 1):
            raise ValueError(f"segments must be a power of two, got {self.segments}")

    def as_data(self) -> dict[str, object]:
        return {
            "arithmetic": self.arithmetic,
            "segments": self.segments,
            "boundaries": {b.name: b.as_data() for b in self.boundaries},
            "model": dict(self.model),
        }

    def digest(self) -> str:
        return digest_of(self.as_data())


def run_contract(
    boundaries: Iterable[Boundary],
    *,
    segments: int,
    model: dict[str, object] | None = None,
    arithmetic: str = "fma32",
) -> RunContract:
    """A RunContract over `boundaries`, with the model's constants as text."""
    constants = tuple(sorted((k, str(v)) for k, v in (model or {}).items()))
    return RunContract(arithmetic=arithmetic, segments=segments, boundaries=tuple(boundaries), model=constants)


def differences(
    left: Mapping[str, object], right: Mapping[str, object], path: str = ""
) -> list[tuple[str, object, object]]:
    """(field, left, right) for every leaf in which two contracts (as data) differ; None where one has no such field."""
    found: list[tuple[str, object, object]] = []
    for key in sorted(left.keys() | right.keys()):
        a, b, name = left.get(key), right.get(key), f"{path}{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{name}.")
        elif a != b:
            found.append((name, a, b))
    return found
