"""From a timeline to the numbers that a page shows: one value per step and name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from samebits.timeline.events import Compared, Evaluated, Event, Measured, Published, Sampled, Timed, Trained

# What a chart can draw: the span of two values is a float, too.
_LARGEST = 1e300
PHASES = ("generate", "reward", "train", "compare", "publish")


@dataclass(kw_only=True)
class Step:
    """What the timeline says about one step; a value that it lacks is missing from the dict."""

    number: int
    values: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    version: str = ""
    worst: str = ""


@dataclass(frozen=True, kw_only=True)
class Series:
    """All steps of a run, and its evaluations as (step, accuracy)."""

    steps: tuple[Step, ...]
    accuracy: tuple[tuple[int, float], ...]

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one quantity, but for values that no chart can draw."""
        found = ((step.number, step.values[name]) for step in self.steps if name in step.values)
        return [(number, value) for number, value in found if abs(value) <= _LARGEST]


def trailing_median(points: Sequence[tuple[int, float]], width: int = 9) -> list[tuple[int, float]]:
    """The median of each value and the up to `width` - 1 before it."""
    values = [value for _, value in points]
    return [(step, median(values[max(0, at + 1 - width) : at + 1])) for at, (step, _) in enumerate(points)]


def collect(events: Iterable[Event]) -> Series:
    """Reads the events of a run, finished or not."""
    steps: dict[int, Step] = {}
    samples: dict[int, list[Sampled]] = {}
    accuracy: list[tuple[int, float]] = []
    version = ""
    for event in events:
        if isinstance(event, Published):
            version = f"v{event.version}:{event.digest[:12]}"
        if isinstance(event, Evaluated):
            accuracy.append((event.step, event.accuracy))
        if isinstance(event, Sampled):
            samples.setdefault(event.step, []).append(event)
        if isinstance(event, Sampled | Trained | Compared | Measured | Timed):
            step = steps.setdefault(event.step, Step(number=event.step, version=version))
            _take(step, event)
    for number, group in samples.items():
        values = steps[number].values
        values["reward"] = _sum(sample.reward for sample in group) / len(group)
        values["response_length"] = sum(sample.response_length for sample in group) / len(group)
    return Series(steps=tuple(steps[number] for number in sorted(steps)), accuracy=tuple(accuracy))


def _sum(values: Iterable[float]) -> float:
    """Exact; infinite where it is beyond float64, as only made-up records have it."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def _take(step: Step, event: Event) -> None:
    match event:
        case Trained():
            step.values |= {
                "loss": event.loss,
                "kl": event.kl,
                "grad_norm": event.grad_norm,
                "clip_fraction": event.clip_fraction,
                "ratio_mean": event.ratio_mean,
            }
        case Compared():
            step.worst = event.worst or ""
            step.values |= {
                "compared_tokens": event.compared_tokens,
                "mismatch_count": event.mismatch_count,
                "max_abs_diff": event.max_abs_diff,
                "mean_abs_diff": event.mean_abs_diff,
            }
        case Measured():
            step.values |= event.metrics
        case Timed():
            step.phases = dict(event.seconds)
            step.values["seconds"] = _sum(event.seconds.values())
            generate = event.seconds.get("generate", 0.0)
            if generate > 0:
                step.values["tokens_per_second"] = event.generated_tokens / generate
        case _:
            pass
