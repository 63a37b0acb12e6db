"""An error that only one trainer rank meets ends the step on all of them, over both transports, by name."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

# The ranks run this file by its path.
sys.path.append(str(Path(__file__).parent))

from trainer_jobs import make_samples, preload, strict  # noqa: F401  run_ranks calls preload

from samebits.testing.ranks import Rank, run_ranks
from samebits.testing.tiny_models import write_tiny_model


def odd_sample_program(me: Rank, settings: str, directory: str) -> dict[str, Tensor]:
    from samebits.collectives import CollectiveError
    from samebits.into_megatron.config import TrainerConfig
    from samebits.into_megatron.trainer import TrainerRank

    errors = []
    for transport in ("gloo", "shared_memory"):
        given: dict[str, Any] = {**json.loads(settings), "transport": transport}
        trainer = TrainerRank(TrainerConfig(**given, rendezvous=f"{directory}/{transport}.rendezvous"), me.rank)
        samples = make_samples(4)
        before = trainer.train_step(0, samples).loss
        if me.rank == 1:
            samples[2] = dataclasses.replace(samples[2], rollout_contract="another")
        try:
            trainer.train_step(1, samples)
        except (ValueError, CollectiveError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        assert before > -100.0
        trainer.close()
    return {"errors": torch.tensor(list("\n".join(errors).encode()), dtype=torch.uint8)}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    home = tmp_path_factory.mktemp("fate")
    settings = json.dumps(strict(str(write_tiny_model(home / "model")), tp=2))
    ranks = run_ranks(__file__, "odd_sample_program", 2, home / "ranks", settings, str(home))
    return [bytes(rank["errors"].tolist()).decode().split("\n") for rank in ranks]


def test_the_rank_itself_says_what_is_wrong(errors: list[list[str]]) -> None:
    assert len(errors[1]) == 2
    assert all(error.startswith("ValueError: sample 0/0/2: scored under run contract another") for error in errors[1])


def test_the_other_rank_names_it_and_its_error(errors: list[list[str]]) -> None:
    assert len(errors[0]) == 2
    for error in errors[0]:
        assert error.startswith("RankFailed: rank 1 (process ")
        assert "failed before" in error
        assert "ValueError: sample 0/0/2: scored under run contract another" in error
