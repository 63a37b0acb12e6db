"""Side-by-side timing: two functions take turns, so that a busy machine slows both alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median


@dataclass(frozen=True)
class Record:
    """One comparison. Seconds are medians; `ratio` is peer over samebits time, so more is better."""

    what: str
    shape: str
    peer: str
    samebits_s: float
    peer_s: float
    ratio: float
    repeats: int
    goal: float | None = None
    reason: str | None = None

    @property
    def missed(self) -> bool:
        return self.goal is not None and self.ratio < self.goal

    def as_data(self) -> dict[str, object]:
        return {**asdict(self), "missed": self.missed}


def interleaved(
    ours: Callable[[], object], theirs: Callable[[], object], *, seconds: float, least: int = 5
) -> tuple[float, float, int]:
    """Median seconds of `ours` and of `theirs`, and how often each ran: in turn for `seconds`, `least` times at least.

    The first call of each warms up and isn't counted.
    """
    ours()
    theirs()
    taken: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while len(taken[0]) < least or time.perf_counter() < end:
        for function, times in zip((ours, theirs), taken, strict=True):
            started = time.perf_counter()
            function()
            times.append(time.perf_counter() - started)
    return median(taken[0]), median(taken[1]), len(taken[0])
