"""With strict_gradients every gradient, norm and weight has the bits of one rank, however the trainer is cut."""

from __future__ import annotations

from typing import Any

import pytest
from trainer_jobs import Results, launch, strict

from samebits.bits import assert_same, first_difference
from samebits.testing.tiny_models import write_tiny_model

SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "plain": SHAPE,
    "tied": {**SHAPE, "tie_word_embeddings": True},
    "biased": {**SHAPE, "architecture": "Qwen2ForCausalLM"},
}
# rank count -> job -> layout; "whole" is the one that the others are compared with
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "whole": {"max_tokens_per_gpu": 10_000},
        "cut": {"max_tokens_per_gpu": 60},
        "tied": {"model": "tied"},
        "biased": {"model": "biased"},
        "default": {"strict_gradients": False},
    },
    4: {
        "tp4": {"tp": 4},
        "tp2-sp-dp2": {"tp": 2, "sequence_parallel": True, "dp": 2},
        "dp4": {"dp": 4, "max_tokens_per_gpu": 60},
        "cp4": {"cp": 4},
        "cp2-rows-dp2": {"cp": 2, "cp_layout": "allgather", "dp": 2},
        "cp2-tp2-sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
        "pp2-dp2": {"pp": 2, "dp": 2, "recompute": True},
        "tied-cp2-pp2": {"model": "tied", "cp": 2, "pp": 2},
        "tied-tp2-dp2": {"model": "tied", "tp": 2, "dp": 2},
        "biased-tp4-sp": {"model": "biased", "tp": 4, "sequence_parallel": True},
        "default-dp4": {"strict_gradients": False, "dp": 4},
    },
}
EVERY = [
    (world, name)
    for world, layouts in LAYOUTS.items()
    for name in layouts
    if name not in ("whole", *MODELS) and "default" not in name
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    at = tmp_path_factory.mktemp("models")
    models = {name: str(write_tiny_model(at / name, **changes)) for name, changes in MODELS.items()}
    found = {}
    for world, layouts in LAYOUTS.items():
        jobs = {}
        for name, layout in layouts.items():
            settings: dict[str, Any] = {"max_tp": 4, "max_tokens_per_gpu": 150, "strict_gradients": True, **layout}
            model = models[settings.pop("model", "plain")]
            jobs[name] = {"config": strict(model, **settings), "steps": 2}
        found[world] = launch(tmp_path_factory.mktemp(f"ranks{world}"), world, jobs)
    return found


@pytest.mark.parametrize(("world", "name"), EVERY)
def test_norm_and_weights_are_those_of_one_rank(runs: dict[int, Results], world: int, name: str) -> None:
    single = LAYOUTS[world][name].get("model", "whole")
    ours, theirs = runs[world].weights(name), runs[1].weights(single)
    assert ours.keys() == theirs.keys()
    wrong = [key for key, weight in theirs.items() if first_difference(ours[key], weight) is not None]
    assert not wrong, f"{name}: other bits in {', '.join(wrong)}"
    for what in ("logp0", "logp1", "metrics0", "metrics1", "norms"):
        assert_same(runs[world](name, what), runs[1](single, what), f"{name}: {what}")
