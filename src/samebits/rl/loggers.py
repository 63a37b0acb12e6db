"""TensorBoard and Weights & Biases as watchers of a run. W&B stays offline, files only, unless told otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from samebits.evidence.record import Watcher
from samebits.evidence.scalars import Scalars
from samebits.evidence.store import TRACKING
from samebits.rl.config import RunConfig
from samebits.timeline.events import Event

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


class Sink(Protocol):
    """Where numbers go."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers of one step."""


def check_loggers(config: RunConfig) -> None:
    """Raises ValueError when a logger that is asked for is not installed, and says how to get it."""
    for name, wanted in (("tensorboard", config.tensorboard), ("wandb", config.wandb != "off")):
        if wanted and find_spec(_PACKAGES[name]) is None:
            raise ValueError(f"{name}: the package {_PACKAGES[name]} is not installed: pip install samebits[{name}]")


@contextmanager
def loggers(config: RunConfig) -> Iterator[Watcher]:
    """A watcher that feeds every logger of the configuration, closed at the end. Their files lie in the run directory,
    outside the seal. Raises ValueError as `check_loggers` does."""
    check_loggers(config)
    scalars = Scalars()
    with ExitStack() as stack:
        sinks: list[Sink] = []

        def watch(event: Event) -> None:
            found = scalars.take(event)
            if found is None:
                return
            if not sinks:
                sinks.extend(_open(config, stack))
            for sink in sinks:
                sink.log(*found)

        yield watch


def _open(config: RunConfig, stack: ExitStack) -> Iterator[Sink]:
    """Opened with the first numbers, when the run directory exists."""
    folder = Path(str(config.run_dir)) / TRACKING
    if config.tensorboard:
        board = _TensorBoard(folder / "tensorboard")
        stack.callback(board.close)
        yield board
    if config.wandb != "off":
        tracker = _Wandb(folder, config)
        stack.callback(tracker.close)
        yield tracker


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, folder: Path, config: RunConfig) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=config.wandb_project,
            name=Path(str(config.run_dir)).name,
            dir=str(folder),
            mode="online" if config.wandb == "online" else "offline",
            config=config.model_dump(),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # An evaluation comes with the number of the step before it, so wandb's own step cannot be used.
        self._run.log({"trainer/global_step": step, **values})

    def close(self) -> None:
        self._run.finish()
