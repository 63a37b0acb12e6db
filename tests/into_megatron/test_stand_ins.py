"""The CPU stand-ins leave nothing behind, and each matches the installed Megatron-Core and torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from samebits.testing.ranks import Rank, run_ranks
from samebits.testing.tiny_models import write_tiny_model


def stand_ins_program(me: Rank, model: str) -> dict[str, Tensor]:
    from samebits.into_megatron import cpu_stand_ins
    from samebits.into_megatron.config import TrainerConfig
    from samebits.into_megatron.trainer import TrainerRank
    from samebits.linear_logp import ProviderRejected
    from samebits.patching import census

    patches = (*cpu_stand_ins.RESIDENT, *cpu_stand_ins.MODEL_SETUP, *cpu_stand_ins.OPTIMIZER_SETUP)
    assert census(patch.symbol for patch in patches) == []
    before = [patch.symbol.resolve() for patch in patches]
    assert not any(patch.in_place() for patch in patches), "importing the trainer must patch nothing"

    trainer = TrainerRank(TrainerConfig(model=model), me.rank)
    assert [patch.in_place() for patch in patches] == [True] * 6 + [False] * 3
    assert torch.zeros(1).type() == "torch.FloatTensor"
    trainer.close()
    trainer.close()

    assert not any(patch.in_place() for patch in patches)
    assert [patch.symbol.resolve() for patch in patches] == before
    with pytest.raises(ProviderRejected, match="is unavailable"):
        TrainerRank(TrainerConfig(model=model, linear_logp_provider="nowhere.to.be.found"), me.rank)
    assert [patch.symbol.resolve() for patch in patches] == before, "one that did not start leaves nothing either"
    assert not torch.distributed.is_initialized()
    assert "type" not in vars(torch.Tensor), "an inherited method must be inherited again"
    with cpu_stand_ins.in_place(cpu_stand_ins.OPTIMIZER_SETUP):
        assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(2).type(torch.int64).dtype == torch.int64
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.BFloat16Tensor"
    return {"done": torch.ones(1)}


def test_stand_ins_are_undone(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    run_ranks(__file__, "stand_ins_program", 1, tmp_path / "run", str(model))


def refusals_program(me: Rank, model: str) -> dict[str, Tensor]:
    """What only a running trainer can refuse."""
    from samebits.into_megatron.config import TrainerConfig
    from samebits.into_megatron.trainer import TrainerRank
    from samebits.timeline.types import SampleKey, TrainSample

    key = SampleKey(3, 1, 4)
    wrong = {
        "outside the trainer's 1 ranks": lambda: TrainerRank(TrainerConfig(model=model), 1),
        "no config.json": lambda: TrainerRank(TrainerConfig(model=model + "-absent"), 0),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    trainer = TrainerRank(TrainerConfig(model=model), 0)
    samples = {
        "sample 3/1/4: token ids must be in [0, 101)": TrainSample(key, (1, 2, 101), 1, 1.0, (0, 0)),
        "sample 3/1/4: prompt of 0 in a sequence of 3": TrainSample(key, (1, 2, 3), 0, 1.0, (0, 0, 0)),
        "at most 256 tokens in all": TrainSample(key, (1,) * 257, 1, 1.0, (0,) * 256),
        "no sample has a response token": TrainSample(key, (1, 2, 3), 3, 1.0, ()),
        "1 rollout log-probabilities for 2 response tokens": TrainSample(key, (1, 2, 3), 1, 1.0, (0,)),
    }
    for message, sample in samples.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            trainer.train_step(0, [sample])
    trainer.close()
    return {"done": torch.ones(1)}


def test_a_running_trainer_names_the_sample_it_refuses(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    run_ranks(__file__, "refusals_program", 1, tmp_path / "run", str(model))
