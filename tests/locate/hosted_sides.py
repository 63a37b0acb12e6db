"""Both sides in processes of their own, as a session wants them, and the tokens they are asked about."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from samebits.contract import digest_of, run_contract
from samebits.contract.boundaries import BOUNDARIES
from samebits.into_megatron.config import TrainerConfig
from samebits.into_vllm.config import EngineConfig
from samebits.locate.model import Decoder
from samebits.locate.session import Answered, Question, Session
from samebits.locate.sides import RolloutHosts, TrainerHosts
from samebits.rl.processes import Group
from samebits.trace import TracedSequence

SEGMENTS = 2
VOCAB = 101


def sequences(count: int = 3, seed: int = 0) -> list[TracedSequence]:
    draw = random.Random(seed)
    return [
        TracedSequence(str(i), tuple(draw.randrange(VOCAB) for _ in range(44 + 3 * i)), 24 + i) for i in range(count)
    ]


def faulty_engine(config: EngineConfig) -> Any:
    """Runs in the process that hosts it."""
    from saboteurs import FaultyEngine

    return FaultyEngine(config)


def faulty_trainer(config: TrainerConfig, rank: int) -> Any:
    """Runs in the process that hosts it."""
    from saboteurs import FaultyTrainer

    return FaultyTrainer(config, rank)


class Pair:
    """A trainer and a rollout engine that can be asked, and in which faults can be planted."""

    def __init__(self, trainer: Group, rollout: Group, model: Path, scratch: Path) -> None:
        self.groups = {"trainer": trainer, "rollout": rollout}
        self.decoder = Decoder.read(model, SEGMENTS)
        self.session = Session(TrainerHosts(trainer, 120), RolloutHosts(rollout, 120), self.decoder, scratch)

    def locate(self, number: int = 1, last: int | None = None) -> Answered:
        every = sequences()
        last = len(every[number].token_ids) - 1 if last is None else last
        return self.session.locate(Question(sequences=every, number=number, last=last))

    @contextmanager
    def fault(self, side: str, name: str) -> Iterator[None]:
        self.groups[side].everyone("plant", name, timeout=60)
        try:
            yield
        finally:
            self.groups[side].everyone("heal", timeout=60)


@contextmanager
def hosted_pair(
    home: Path,
    model: Path,
    name: str,
    trainer: Mapping[str, Any] | None = None,
    rollout: Mapping[str, Any] | None = None,
) -> Iterator[Pair]:
    """Both sides, started at the same time; `trainer` and `rollout` change their configurations."""
    agreed = run_contract(BOUNDARIES, segments=SEGMENTS).as_data()
    strict = {"contract": digest_of(agreed), "agreed": agreed, "rendezvous": str(home / f"{name}.rendezvous")}
    config = TrainerConfig(model=str(model), max_tp=SEGMENTS, **{**strict, **(trainer or {})})
    settings: dict[str, Any] = {
        "contract": agreed, "max_tp": SEGMENTS, "max_model_len": 128, "kv_cache_gib": 1 / 64, "block_size": 16,
        "forced": True, "max_num_batched_tokens": 64, **(rollout or {}),
    }  # fmt: skip
    engines = Group([f"{name} engine"], home)
    ranks = Group([f"{name} rank {rank}" for rank in range(config.world_size)], home)
    try:
        ready = engines.start(faulty_engine, [(EngineConfig(model=str(model), **settings),)])
        ranks.gather("start", ranks.start(faulty_trainer, [(config, rank) for rank in range(config.world_size)]), 300)
        engines.gather("start", ready, 300)
        yield Pair(ranks, engines, model, home / f"{name}-scratch")
    finally:
        engines.kill()
        ranks.kill()
