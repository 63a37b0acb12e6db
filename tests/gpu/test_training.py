"""Megatron-Core on a GPU with the samebits route: the definition's bits on one rank and on several that share a card.

python -m pytest tests/gpu/test_training.py
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "into_megatron"))

from trainer_jobs import Results, launch, make_samples, oracle, strict, with_supports

from samebits.bits import assert_same, first_difference
from samebits.into_megatron.model import read_shape
from samebits.into_megatron.weights import from_megatron
from samebits.testing.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed here"),
]
SHAPE = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": SHAPE,
    "tied": {**SHAPE, "tie_word_embeddings": True},
    "biased": {**SHAPE, "architecture": "Qwen2ForCausalLM"},
}
# Ranks share a card. With CP a rank holds half of each micro-batch, so that all layouts make the same ones.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tp2": {"tp": 2},
        "tp2-sp": {"tp": 2, "sequence_parallel": True},
        "cp2": {"cp": 2, "max_tokens_per_gpu": 100},
        "cp2-rows": {"cp": 2, "cp_layout": "allgather", "max_tokens_per_gpu": 100},
        "dp2": {"dp": 2},
        "epsilon": {"tp": 2, "fault": "epsilon"},
        "limited": {"tp": 2, "limited": True, "strict_gradients": False},
    },
    4: {"tp2-cp2": {"tp": 2, "cp": 2, "max_tokens_per_gpu": 100}},
}
EVERY = [(ranks, name) for ranks, layouts in LAYOUTS.items() for name in layouts if name not in ("epsilon", "limited")]


def on_gpu(model: str, **settings: Any) -> dict[str, Any]:
    return strict(model, device="cuda", timeout_seconds=60, **{"max_tokens_per_gpu": 200, **settings})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    at = tmp_path_factory.mktemp("models")
    return {name: str(write_tiny_model(at / name, **changes)) for name, changes in MODELS.items()}


@pytest.fixture(scope="module")
def one(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    qwen3 = models["qwen3"]
    jobs: dict[str, dict[str, Any]] = {
        "default": {"config": on_gpu(qwen3), "steps": 2, "alone": True},
        "again": {"config": on_gpu(qwen3), "steps": 2},
        "strict": {"config": on_gpu(qwen3, strict_gradients=True), "steps": 2},
        "at once": {"config": on_gpu(qwen3), "steps": 1, "fault": "at once"},
        "lost work": {"config": on_gpu(qwen3), "steps": 1, "fault": "lost work"},
        "offload": {"config": on_gpu(qwen3, optimizer_offload=1.0), "steps": 2},
        "limited": {"config": on_gpu(qwen3), "steps": 1, "limited": True},
        "recompute": {"config": on_gpu(qwen3, recompute=True), "steps": 1},
        **{name: {"config": on_gpu(models[name]), "steps": 1} for name in ("tied", "biased")},
    }
    return launch(tmp_path_factory.mktemp("one"), 1, jobs)


@pytest.fixture(scope="module")
def native(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """In a process of its own, whose kernel counters must stay at zero."""
    job = {"config": on_gpu(models["qwen3"]), "case": {"attention": "P", "ffn": "P", "logp": "P"}, "steps": 1}
    return launch(tmp_path_factory.mktemp("native"), 1, {"native": job})


@pytest.fixture(scope="module")
def several(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    found = {}
    for ranks, layouts in LAYOUTS.items():
        jobs = {}
        for name, layout in layouts.items():
            settings = {"strict_gradients": True, **layout}
            job = {"fault": settings.pop("fault", "none"), "limited": settings.pop("limited", False)}
            jobs[name] = {"config": on_gpu(models["qwen3"], **settings), "steps": 2, **job}
        found[ranks] = launch(tmp_path_factory.mktemp(f"ranks{ranks}"), ranks, jobs)
    return found


@pytest.mark.parametrize(("job", "model"), [("default", "qwen3"), ("tied", "tied"), ("biased", "biased")])
def test_log_probabilities_are_those_of_the_ops_alone(
    one: Results, models: dict[str, str], job: str, model: str
) -> None:
    expected = oracle(models[model], make_samples(), device="cuda")
    assert_same(one(job, "score"), expected, "score")
    assert_same(one(job, "logp0"), expected, "the forward that is differentiated")
    if importlib.util.find_spec("samebits._cpu") is not None:
        assert first_difference(expected, oracle(models[model], make_samples())) is not None, "the CPU has other bits"


def test_packing_and_recomputation_change_no_bit(one: Results) -> None:
    assert_same(one("default", "alone"), one("default", "score"), "samples scored alone")
    assert_same(one("recompute", "logp0"), one("default", "logp0"), "recomputed layers")
    for name, gradient in one.gradients("default", 1)[0].items():
        assert_same(one.gradients("recompute", 1)[0][name], gradient, f"gradient of {name}")


def test_the_same_run_twice_gives_the_same_weights(one: Results) -> None:
    for what in ("logp0", "logp1", "norms", "metrics0", "metrics1"):
        assert_same(one("again", what), one("default", what), what)
    for name, gradient in one.gradients("default", 1)[0].items():
        assert gradient.abs().sum() > 0
        assert_same(one.gradients("again", 1)[0][name], gradient, f"gradient of {name}")
    for name, weight in one.weights("default").items():
        assert_same(one.weights("again")[name], weight, name)
    assert first_difference(one("default", "logp1"), one("default", "logp0")) is not None


def test_gradients_that_wait_for_others_are_those_computed_at_once(one: Results) -> None:
    found = one.gradients("default", 1)[0]
    for name, gradient in one.gradients("at once", 1)[0].items():
        assert_same(found[name], gradient, f"gradient of {name}")
    lost = one.gradients("lost work", 1)[0]
    assert {name for name in found if lost[name].count_nonzero() == 0} == {
        name for name in found if name.endswith("layernorm.weight")
    }


def test_moments_in_host_memory_change_no_bit(one: Results) -> None:
    for name, weight in one.weights("default").items():
        assert_same(one.weights("offload")[name], weight, f"{name} after two steps")


def test_native_modules_differ_but_are_close(one: Results, native: Results) -> None:
    assert first_difference(native("native", "logp0"), one("default", "logp0")) is not None
    assert (native("native", "logp0") - one("default", "logp0")).abs().max() < 0.5


@pytest.mark.parametrize(("ranks", "name"), EVERY)
def test_ranks_that_share_a_card_change_no_bit(
    one: Results, several: dict[int, Results], models: dict[str, str], ranks: int, name: str
) -> None:
    found = several[ranks]
    for what in ("score", "logp0", "logp1", "norms", "metrics0", "metrics1"):
        assert_same(found(name, what), one("strict", what), f"{name}: {what}")
    shape, tp = read_shape(models["qwen3"]), LAYOUTS[ranks][name].get("tp", 1)
    ours = from_megatron(found.gradients(name, tp), shape)
    for key, gradient in from_megatron(one.gradients("strict", 1), shape).items():
        assert_same(ours[key], gradient, f"{name}: gradient of {key}")
    for key, weight in one.weights("strict").items():
        assert_same(found.weights(name)[key], weight, f"{name}: {key} after two steps")


def test_a_wrong_epsilon_on_one_rank_is_noticed(one: Results, several: dict[int, Results]) -> None:
    for what in ("score", "logp0", "norms"):
        assert first_difference(several[2]("epsilon", what), one("strict", what)) is not None, what


def test_tokens_that_were_drawn_from_a_support(
    one: Results, several: dict[int, Results], models: dict[str, str]
) -> None:
    expected = oracle(models["qwen3"], with_supports(make_samples()), device="cuda")
    assert first_difference(expected, one("default", "score")) is not None, "renormalising shows"
    for name, found in (("one rank", one), ("two ranks", several[2])):
        for what in ("score", "logp0"):
            assert_same(found("limited", what), expected, f"{name}: {what}")
        assert all(g.isfinite().all() and g.any() for g in found.gradients("limited", 1)[0].values()), name


def test_squares_of_gradients_are_added_in_one_order() -> None:
    from samebits.into_megatron.ordered import gradient_norm

    gradients = [torch.randn(size, device="cuda") for size in (40_000, 3, 16_384)]
    found = gradient_norm(gradients, None)
    assert found == gradient_norm([gradient.clone() for gradient in gradients], None)
    assert found == pytest.approx(gradient_norm([gradient.cpu() for gradient in gradients], None), rel=1e-12)
