"""Layouts, packings and routes do not show: what is located is the fault, not the layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hosted_sides import Pair, hosted_pair
from test_faults import Planted, check

from samebits.contract.routes import ModuleRoutes
from samebits.evidence.verdict import Verdict
from samebits.testing.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def split_trainer(shop: Path) -> Iterator[Pair]:
    """A model with biases and without QK-norm: two tensor-parallel ranks that split rows, against one worker."""
    model = write_tiny_model(shop / "qwen2", "Qwen2ForCausalLM", hidden_size=256, intermediate_size=1024)
    with hosted_pair(shop, model, "tp2", trainer={"tp": 2, "sequence_parallel": True}) as found:
        yield found


@pytest.mark.parametrize(
    "planted",
    [
        Planted("trainer", "no_bias", "qkv projection", 1, "operator", 0),
        Planted("trainer", "attention_scale", "attention", 1, "parameter", 1),
        Planted("rollout", "stale_weight", "down projection", 1, "weights", guilty=False),
        Planted("rollout", "swapped_pages", "KV cache", 1, "KV cache", 0, "the key of position 16", guilty=False),
    ],
    ids=lambda planted: planted.fault,
)
def test_two_trainer_ranks_against_one_worker(split_trainer: Pair, planted: Planted) -> None:
    check(split_trainer, planted)
    assert split_trainer.locate().located.verdict is Verdict.SAME


def test_context_parallel_ranks_against_two_workers(shop: Path, qwen3: Path) -> None:
    """The engine runs module by module here, and each trainer rank holds two chunks of the sequence."""
    with hosted_pair(shop, qwen3, "cp2", trainer={"cp": 2}, rollout={"tp": 2}) as pair:
        found = pair.locate().located
        assert found.verdict is Verdict.SAME, found
        assert found.not_compared == ()
        assert found.tokens_compared >= 40
        check(pair, Planted("trainer", "attention_scale", "attention", 1, "parameter", 1))
        check(pair, Planted("trainer", "native_swiglu", "SwiGLU", 0, "operator"))


def test_native_code_on_both_sides(shop: Path, qwen3: Path) -> None:
    """Padded batches and packed weights: tokens still meet, and the two engines part inside the first layer."""
    strict = {"contract": "", "agreed": {}}
    native = {"attention": "P", "ffn": "P", "logp": "P"}
    trainer = {**strict, "case": ModuleRoutes(**native)}  # type: ignore[arg-type]
    rollout = {"contract": {}, "block_size": 32, "case": ModuleRoutes(**native)}  # type: ignore[arg-type]
    with hosted_pair(shop, qwen3, "native", trainer=trainer, rollout=rollout) as pair:
        found = pair.locate().located
        assert found.where is not None
        assert found.where.layer == 0, found
        assert found.kind in ("operator", "region"), found
        assert found.trainer is not None
        assert found.rollout is not None
        assert (found.trainer.route, found.rollout.route) == ("P", "P")
        assert {point.partition(".")[2] for point in found.not_compared} == {"keys", "values"}
        with pair.fault("rollout", "other_token"):
            assert pair.locate().located.kind == "input ids"
