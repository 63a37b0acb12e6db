"""How fast a run was once it was warm, from its timeline. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from samebits.timeline.events import Event, Timed

WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Rates over the steps after the first `warm_up`, which build caches and thread pools."""

    warm_up: int
    steps: int
    tokens_per_second: float
    seconds_per_step: float


def equal_length(runs: Sequence[Iterable[Event]], tolerance: float = 0.1, warm_up: int = WARM_UP) -> list[Speed] | None:
    """The speeds of several runs over those warm steps in which each generated about as much as the first run did:
    within `tolerance`. None when there is no such step."""
    steps = [{event.step: event for event in events if isinstance(event, Timed)} for events in runs]
    chosen = [
        number
        for number, first in steps[0].items()
        if number > warm_up
        and all(
            number in others
            and abs(others[number].generated_tokens - first.generated_tokens) <= tolerance * first.generated_tokens
            for others in steps
        )
    ]
    return [speed([found[number] for number in chosen], warm_up=0) for found in steps] if chosen else None


def speed(events: Iterable[Event], warm_up: int = WARM_UP) -> Speed:
    """Generated tokens per second of generation, and seconds of all phases per step.

    A run too short for `warm_up` leaves out as many of its steps as keep one. Without a step, rates are 0.0.
    """
    timed = [event for event in events if isinstance(event, Timed)]
    skipped = max(0, min(warm_up, len(timed) - 1))
    warm = timed[skipped:]
    generating = math.fsum(event.seconds.get("generate", 0.0) for event in warm)
    return Speed(
        warm_up=skipped,
        steps=len(warm),
        tokens_per_second=sum(event.generated_tokens for event in warm) / generating if generating > 0 else 0.0,
        seconds_per_step=math.fsum(sum(event.seconds.values()) for event in warm) / max(len(warm), 1),
    )
