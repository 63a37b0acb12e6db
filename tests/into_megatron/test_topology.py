"""Tensor, sequence, context, pipeline and data parallelism in real Megatron-Core ranks: the bits of one rank."""

from __future__ import annotations

from typing import Any

import pytest
from trainer_jobs import Results, launch, make_samples, strict

from samebits.bits import assert_same, first_difference
from samebits.testing.tiny_models import write_tiny_model

# Eight query heads over two key/value heads: four ranks share them by two, eight by four.
SHAPE = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "plain": SHAPE,
    "tied": {**SHAPE, "tie_word_embeddings": True},
    "biased": {**SHAPE, "architecture": "Qwen2ForCausalLM"},
}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    4: {
        "dp4": {"dp": 4},
        "pp2-dp2": {"pp": 2, "dp": 2},
        "pp2-vpp2-dp2": {"pp": 2, "vpp": 2, "dp": 2},
        "tp2-sp-pp2": {"tp": 2, "sequence_parallel": True, "pp": 2},
        "cp4": {"cp": 4},
        "cp4-rows": {"cp": 4, "cp_layout": "allgather"},
        "cp2-rows-dp2": {"cp": 2, "cp_layout": "allgather", "dp": 2},
        "cp2-pp2-vpp2": {"cp": 2, "pp": 2, "vpp": 2},
        "tp4": {"tp": 4, "vocab_multiple": 64},
        "tp2-sp-cp2-rows": {"tp": 2, "sequence_parallel": True, "cp": 2, "cp_layout": "allgather"},
        "tied-pp2-vpp2-dp2": {"model": "tied", "pp": 2, "vpp": 2, "dp": 2, "recompute": True},
        "tied-tp2-pp2": {"model": "tied", "tp": 2, "pp": 2},
        "biased-tp4-sp": {"model": "biased", "tp": 4, "sequence_parallel": True},
    },
    8: {
        "tp8": {"tp": 8},
        "tp8-sp": {"tp": 8, "sequence_parallel": True, "vocab_multiple": 16},
        "tp2-cp2-pp2": {"tp": 2, "cp": 2, "pp": 2},
    },
}
EVERY = [(world, name) for world, layouts in LAYOUTS.items() for name in layouts]


def job(models: dict[str, str], model: str = "plain", **layout: Any) -> dict[str, Any]:
    return {"config": strict(models[model], max_tp=8, max_tokens_per_gpu=150, **layout), "steps": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    at = tmp_path_factory.mktemp("models")
    return {name: str(write_tiny_model(at / name, **changes)) for name, changes in MODELS.items()}


@pytest.fixture(scope="module")
def alone(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(tmp_path_factory.mktemp("alone"), 1, {name: job(models, name) for name in MODELS})


@pytest.fixture(scope="module")
def split(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    return {
        world: launch(
            tmp_path_factory.mktemp(f"ranks{world}"),
            world,
            {name: job(models, **sizes) for name, sizes in jobs.items()},
        )
        for world, jobs in LAYOUTS.items()
    }


def model_of(layout: dict[str, Any]) -> str:
    return layout.get("model", "plain")


@pytest.mark.parametrize(("world", "name"), EVERY)
def test_log_probabilities_are_those_of_one_rank(
    split: dict[int, Results], alone: Results, world: int, name: str
) -> None:
    single = model_of(LAYOUTS[world][name])
    for rank in range(world):
        for what in ("score", "logp0"):
            assert_same(split[world](name, what, rank), alone(single, what), f"{name}, rank {rank}: {what}")


@pytest.mark.parametrize(("world", "name"), EVERY)
def test_metrics_are_those_of_one_rank_and_the_same_on_all(
    split: dict[int, Results], alone: Results, world: int, name: str
) -> None:
    single = model_of(LAYOUTS[world][name])
    assert_same(split[world](name, "metrics0"), alone(single, "metrics0"), f"{name}: loss, KL, ratio and clipping")
    for rank in range(1, world):
        for what in ("metrics0", "metrics1", "norms"):
            assert_same(split[world](name, what, rank), split[world](name, what), f"{name}, rank {rank}: {what}")


@pytest.mark.parametrize(("world", "name"), EVERY)
def test_gradient_norm_and_weights_are_close_to_those_of_one_rank(
    split: dict[int, Results], alone: Results, world: int, name: str
) -> None:
    single = model_of(LAYOUTS[world][name])
    assert split[world](name, "norms")[0].item() == pytest.approx(alone(single, "norms")[0].item(), rel=2e-3)
    ours, theirs = split[world].weights(name), alone.weights(single)
    assert ours.keys() == theirs.keys()
    for weight, tensor in theirs.items():
        error = (ours[weight].double() - tensor.double()).norm() / tensor.double().norm()
        assert error < 2e-2, f"{name}: {weight} is off by {error:.4f} after two steps"


def test_two_steps_change_the_log_probabilities(alone: Results) -> None:
    assert sum(sample.response_length for sample in make_samples()) >= 256
    assert first_difference(alone("plain", "logp1"), alone("plain", "logp0")) is not None
