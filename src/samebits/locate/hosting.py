"""Starting both sides for a session, from the run configuration of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from samebits.contract import RunContract
from samebits.rl.config import RunConfig
from samebits.rl.inputs import Inputs
from samebits.rl.job import Parts
from samebits.rl.processes import Group, close, gather_starts


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One side's configuration. In a run both sides have the same one."""

    config: RunConfig
    inputs: Inputs
    contract: RunContract


@contextmanager
def hosted(
    parts: Parts, trainer: Setting, rollout: Setting, engine: int, folder: Path, scratch: Path
) -> Iterator[tuple[Group, Group]]:
    """All trainer ranks and one engine that produces given tokens, in processes of their own.

    Their logs go to `folder`, they meet in `scratch`. Raises ValueError for settings that a side can't serve, RunFailed
    when a process fails.
    """
    config = trainer.config
    (engine_config,) = parts.engine_arguments(rollout.config, rollout.inputs, rollout.contract, engine)
    engine_config = dataclasses.replace(engine_config, forced=True)
    ranks = [
        parts.trainer_arguments(config, trainer.inputs, trainer.contract, rank, scratch)
        for rank in range(config.trainer_ranks)
    ]
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        engines = Group([f"rollout engine {engine}"], logs)
        stack.callback(engines.kill)
        trainers = Group([f"trainer rank {rank}" for rank in range(config.trainer_ranks)], logs)
        stack.callback(trainers.kill)
        engine_ready = engines.start(parts.engine, [(engine_config,)])
        ranks_ready = trainers.start(parts.trainer, ranks)
        gather_starts((trainers, ranks_ready), (engines, engine_ready), timeout=config.start_timeout)
        yield trainers, engines
        close(engines, trainers)
