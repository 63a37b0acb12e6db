"""One rank's life in `layout_weights.py`: fixed samples, a number of steps, the digest of the weights."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from samebits.contract import digest_of
from samebits.into_megatron.config import TrainerConfig
from samebits.testing.ranks import Rank
from samebits.timeline.types import SampleKey, TrainSample

MODEL = Path(__file__).resolve().parents[1] / "src/samebits/presets/arithmetic/model"
MAX_TP = 4


def samples() -> list[TrainSample]:
    """16 samples of 20 to 60 tokens; the trainer's own first scores become the rollout's log-probabilities."""
    draw, made = random.Random(3), []
    for index in range(16):
        prompt, response = draw.randint(10, 20), draw.randint(10, 40)
        ids = tuple(draw.randrange(4, 512) for _ in range(prompt + response))
        made.append(TrainSample(SampleKey(0, index // 4, index % 4), ids, prompt, draw.uniform(-1, 1), (0,) * response))
    return made


def train(me: Rank, settings: str, steps: str, directory: str) -> dict[str, Tensor]:
    """One rank, with and without strict gradients, one after the other: tensors named `strict/..` and `default/..`."""
    found = {}
    for kind, strict in (("strict", True), ("default", False)):
        config = TrainerConfig(
            model=str(MODEL),
            reference=str(MODEL),
            kl_coef=0.001,
            lr=1e-4,
            max_tp=MAX_TP,
            strict_gradients=strict,
            rendezvous=f"{directory}/{kind}" if me.world > 1 else "",
            **json.loads(settings),
        )
        found |= {f"{kind}/{name}": tensor for name, tensor in run_steps(config, me.rank, int(steps)).items()}
    return found


def run_steps(config: TrainerConfig, rank: int, steps: int) -> dict[str, Tensor]:
    """The digest of the weights after the last step (first rank), gradient norms, and CPU seconds of each step."""
    from samebits.into_megatron.trainer import TrainerRank

    trainer = TrainerRank(config, rank)
    scores = trainer.score(samples())
    batch = [replace(sample, rollout_logp_bits=scores[sample.key]) for sample in samples()]
    norms, seconds = [], []
    for step in range(steps):
        started = time.process_time()
        norms.append(trainer.train_step(step, batch).grad_norm)
        seconds.append(time.process_time() - started)
    with TemporaryDirectory() as folder:
        digests = trainer.export(folder)
    trainer.close()
    digest = torch.tensor(list(digest_of(digests).encode()), dtype=torch.uint8)
    return {"digest": digest, "norms": torch.tensor(norms, dtype=torch.float64), "seconds": torch.tensor(seconds[1:])}
