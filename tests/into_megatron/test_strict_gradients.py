"""With strict_gradients every gradient, norm and weight has the bits of one rank, however the trainer is cut."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_jobs import Results, launch, strict

from samebits.bits import assert_same, first_difference
from samebits.collectives import fold_neighbours
from samebits.contract.routes import ModuleRoutes
from samebits.into_megatron.config import TrainerConfig
from samebits.into_megatron.model import read_shape
from samebits.into_megatron.ordered import exact_norm, gradient_norm
from samebits.into_megatron.segments import SegmentSums
from samebits.into_megatron.weights import from_megatron
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
        "faulty-epsilon": {"dp": 4, "fault": "epsilon"},
        "faulty-tree": {"dp": 4, "fault": "tree"},
    },
}
EVERY = [
    (world, name)
    for world, layouts in LAYOUTS.items()
    for name in layouts
    if name not in ("whole", *MODELS) and not name.startswith(("default", "faulty"))
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    at = tmp_path_factory.mktemp("models")
    return {name: str(write_tiny_model(at / name, **changes)) for name, changes in MODELS.items()}


@pytest.fixture(scope="module")
def runs(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    found = {}
    for world, layouts in LAYOUTS.items():
        jobs = {}
        for name, layout in layouts.items():
            settings: dict[str, Any] = {"max_tp": 4, "max_tokens_per_gpu": 150, "strict_gradients": True, **layout}
            model = models[settings.pop("model", "plain")]
            jobs[name] = {"fault": settings.pop("fault", "none"), "config": strict(model, **settings), "steps": 2}
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


@pytest.mark.parametrize(("world", "name"), EVERY)
def test_fp32_gradients_are_those_of_one_rank(
    runs: dict[int, Results], models: dict[str, str], world: int, name: str
) -> None:
    layout = LAYOUTS[world][name]
    single = layout.get("model", "whole")
    shape = read_shape(models[layout.get("model", "plain")])
    ours = from_megatron(runs[world].staged_gradients(name, layout.get("tp", 1), layout.get("pp", 1)), shape)
    theirs = from_megatron(runs[1].staged_gradients(single, 1, 1), shape)
    for key, gradient in theirs.items():
        assert gradient.abs().sum() > 0
        assert_same(ours[key], gradient, f"{name}: gradient of {key}")


def other_gradients(left: Results, job: str, right: Results, single: str) -> int:
    """How many of the fp32 gradients differ in bits, where every rank holds the whole model."""
    ours, theirs = left.gradients(job, 1)[0], right.gradients(single, 1)[0]
    return sum(first_difference(ours[key], gradient) is not None for key, gradient in theirs.items())


@pytest.mark.parametrize(("world", "name", "single"), [(4, "default-dp4", "default"), (1, "default", "whole")])
def test_without_the_option_gradients_differ(runs: dict[int, Results], world: int, name: str, single: str) -> None:
    assert other_gradients(runs[world], name, runs[1], single) >= 10
    assert first_difference(runs[world](name, "norms"), runs[1](single, "norms")) is not None
    assert_same(runs[world](name, "logp0"), runs[1](single, "logp0"), "the first forward pass is the same all the same")


def test_another_tree_on_one_rank_is_noticed(runs: dict[int, Results]) -> None:
    assert_same(runs[4]("faulty-tree", "logp0"), runs[1]("whole", "logp0"))
    assert other_gradients(runs[4], "faulty-tree", runs[1], "whole") >= 10
    assert first_difference(runs[4]("faulty-tree", "norms", 0), runs[4]("faulty-tree", "norms", 1)) is not None


def test_another_epsilon_on_one_rank_is_noticed(runs: dict[int, Results]) -> None:
    for what in ("score", "logp0", "norms"):
        assert first_difference(runs[4]("faulty-epsilon", what), runs[1]("whole", what)) is not None, what


def test_a_lost_micro_batch_fails_the_step_before_the_update(models: dict[str, str], tmp_path: Path) -> None:
    job = {"config": strict(models["plain"], max_tokens_per_gpu=150), "steps": 1, "fault": "lost"}
    with pytest.raises(RuntimeError, match=r"active token \d+ was scored 0 times, want once"):
        launch(tmp_path, 1, {"lost": job})


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("missing", [(), (0, 1), (3, 4, 5), (6, 7), tuple(range(1, 8))])
def test_segments_add_along_one_tree_however_ranks_share_them(ranks: int, missing: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(1)
    leaves = [torch.randn(300, generator=draw) for _ in range(8)]
    leaves = [torch.zeros(300) if i in missing else leaf for i, leaf in enumerate(leaves)]
    parts = []
    for rank in range(ranks):
        buffer, each = torch.zeros(300), 8 // ranks
        sums = SegmentSums([buffer])
        sums.start(rank * each)
        for segment in range(rank * each, (rank + 1) * each):
            if segment not in missing:
                sums.enter(segment)
                buffer += leaves[segment]
        sums.finish((rank + 1) * each)
        parts.append(buffer)
    assert_same(fold_neighbours(parts), fold_neighbours(leaves))


def test_segments_out_of_order_are_refused() -> None:
    sums = SegmentSums([torch.zeros(2)])
    sums.start(0)
    sums.enter(2)
    with pytest.raises(RuntimeError, match="gradient segment 1 after 2"):
        sums.enter(1)


def test_the_exact_norm_depends_on_the_numbers_alone() -> None:
    draw = torch.Generator().manual_seed(2)
    values = torch.randn(4000, generator=draw) * 10.0 ** torch.randint(-30, 15, (4000,), generator=draw)
    values[:3] = torch.tensor([1e-45, -3.4e38, 0.0])
    exact = math.sqrt(sum(Fraction(v) ** 2 for v in values.tolist()))
    assert exact_norm([values], None) == exact
    shuffled = values[torch.randperm(4000, generator=draw)]
    assert exact_norm(shuffled.split(700), None) == exact
    assert gradient_norm(shuffled.split(700), None) == pytest.approx(exact, rel=1e-12)
    assert exact_norm([values[3:]], None) != exact
    for wrong in (math.nan, math.inf):
        assert math.isnan(exact_norm([values, torch.tensor([wrong])], None))


def test_native_modules_have_no_such_order() -> None:
    with pytest.raises(ValueError, match="strict_gradients: Megatron-Core's own modules have no such order"):
        TrainerConfig(model="", strict_gradients=True, case=ModuleRoutes(ffn="P"))
