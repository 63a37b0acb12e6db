"""Showing a run while it happens: one plain line per step, and on a terminal a bar below them."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from samebits.timeline.events import (
    Compared,
    Evaluated,
    Event,
    Published,
    RunStarted,
    Sampled,
    Timed,
    Trained,
)


class Watch:
    """Takes the run's events one by one. A context manager; `watch(event)` is the recorder's watcher."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._rewards: list[float] = []
        self._trained: Trained | None = None
        self._compared: Compared | None = None
        self._steps = 0

    def __enter__(self) -> Watch:
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._progress = Progress(*columns, console=self._console)
            self._task = self._progress.add_task("starting", total=None)
            self._progress.start()
        else:
            self._console.print("starting the rollout engines and the trainer")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._steps = event.steps
            case Published(version=0):
                self._update(total=self._steps, description="training")
            case Sampled():
                self._rewards.append(event.reward)
            case Trained():
                self._trained = event
            case Compared():
                self._compared = event
            case Timed():
                self._step(event)
            case Evaluated():
                self._print(f"after step {event.step}: held-out accuracy {event.accuracy:.3f}")
            case _:
                pass

    def _step(self, timed: Timed) -> None:
        self._print(f"step {timed.step}/{self._steps}  {self._numbers(timed)}")
        self._rewards = []
        self._update(completed=timed.step)

    def _numbers(self, timed: Timed) -> str:
        assert self._trained is not None
        assert self._compared is not None
        reward = sum(self._rewards) / max(len(self._rewards), 1)
        rate = timed.generated_tokens / max(timed.seconds.get("generate", 0.0), 1e-9)
        return (
            f"reward {reward:.3f}  mismatch_count {self._compared.mismatch_count} of "
            f"{self._compared.compared_tokens}  max_abs_diff {self._compared.max_abs_diff:.3g}  "
            f"KL {self._trained.kl:.3g}  {rate:.0f} tokens/s  {sum(timed.seconds.values()):.2f} s"
        )

    def _update(self, **fields: object) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, **fields)  # type: ignore[arg-type]

    def _print(self, line: str) -> None:
        console = self._progress.console if self._progress is not None else self._console
        console.print(line)
