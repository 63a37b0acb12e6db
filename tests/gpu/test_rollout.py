"""vLLM on a GPU with the samebits route: the bits of one packed forward pass, eager and captured.

python -m pytest tests/gpu/test_rollout.py
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "into_vllm"))

from hosted_engines import Engine, engine_config, hosted
from models import make_model, make_requests
from oracle import response_bits
from watched import WholeGraphEngine

from samebits.backends import device_arithmetic
from samebits.contract import run_contract
from samebits.evidence.routes import check_routes
from samebits.timeline.types import Rollout, WeightVersion

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
]
SEGMENTS = 2
REQUESTS = make_requests(24, tokens=40)


def gpu_config(model: Path, **changes: Any) -> Any:
    from samebits.contract.boundaries import BOUNDARIES

    arithmetic = device_arithmetic(torch.device("cuda", 0))
    contract = run_contract(BOUNDARIES, segments=SEGMENTS, arithmetic=arithmetic).as_data()
    settings = {"device": "cuda", "contract": contract, "kv_cache_gib": 1.0, **changes}
    return engine_config(model, **settings)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu_rollout")


@pytest.fixture(scope="module")
def tiny(home: Path) -> Path:
    return make_model(home / "tiny")


@pytest.fixture(scope="module")
def eager(home: Path, tiny: Path) -> Iterator[Engine]:
    with hosted(home, "eager", gpu_config(tiny, graphs=False)) as engine:
        yield engine


@pytest.fixture(scope="module")
def captured(home: Path, tiny: Path) -> Iterator[Engine]:
    with hosted(home, "captured", gpu_config(tiny)) as engine:
        yield engine


def facts(rollouts: list[Rollout]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(r.token_ids, r.logp_bits) for r in rollouts]


def test_the_bits_are_those_of_one_packed_forward_pass(eager: Engine, tiny: Path) -> None:
    batch = eager("generate", REQUESTS)
    assert sum(len(r.token_ids) for r in batch) >= 256
    assert [r.logp_bits for r in batch] == response_bits(tiny, batch, [1.0] * len(batch), SEGMENTS, "cuda")


def test_the_comparison_can_fail(eager: Engine, home: Path) -> None:
    batch = eager("generate", REQUESTS)
    other = make_model(home / "other", seed=1)
    expected = response_bits(other, batch, [1.0] * len(batch), SEGMENTS, "cuda")
    assert all(r.logp_bits != bits for r, bits in zip(batch, expected, strict=True))


def test_graphs_change_nothing_and_leave_evidence(eager: Engine, captured: Engine) -> None:
    before = captured("proof")[0]
    assert facts(captured("generate", REQUESTS)) == facts(eager("generate", REQUESTS))
    proof = captured("proof")[0]
    assert proof["mode"] == "captured"
    # what the host launched and what ran on the device: only a replayed graph lets the second grow faster
    grown = {name: count - before["counters"].get(name, 0) for name, count in proof["counters"].items()}
    calls = sum(
        proof["modules"][name]["calls"] - before["modules"][name]["calls"]
        for name, module in proof["modules"].items()
        if module["boundary"] == "attention"
    )
    assert grown["rotary.heads"] == grown["rms_norm.heads"] == grown["attention.merge_chunks"] > calls, grown
    assert min(grown[name] for name in ("rms_norm.forward", "linear.forward", "swiglu.forward", "sample.choose")) > 0


def test_calls_that_computed_are_proven_one_by_one(captured: Engine) -> None:
    captured("generate", REQUESTS)
    proof = captured("proof")[0]
    assert all(m["captured"] > 0 for name, m in proof["modules"].items() if name.endswith("mlp.act_fn"))
    cases = dict.fromkeys(("attention", "ffn", "logp"), "R/R")
    assert check_routes([proof], cases, proof["contract"], 0, 1, 1) == []
    calls = max(m["calls"] for m in proof["modules"].values() if m["boundary"] == "swiglu")
    for count, complaint in ((calls - 1, f"said to have run {calls} times"), (0, "its kernels counted 0")):
        short = {**proof, "counters": {**proof["counters"], "swiglu.forward": count}}
        assert complaint in check_routes([short], cases, proof["contract"], 0, 1, 1)[0]


def test_new_weights_in_an_engine_with_graphs(home: Path, tiny: Path, captured: Engine) -> None:
    """Published while steps are scheduled ahead: the graphs read the new ones, and later the old ones again."""
    before = facts(captured("generate", REQUESTS))
    other = make_model(home / "published", seed=2)
    for number, model in ((1, other), (2, tiny)):
        version = WeightVersion(number, f"{number:064x}")
        captured("publish", str(model), version)
        batch = captured("generate", REQUESTS)
        assert {r.version for r in batch} == {version}
        assert [r.logp_bits for r in batch] == response_bits(model, batch, [1.0] * len(batch), SEGMENTS, "cuda")
        assert (facts(batch) == before) == (model == tiny)


def test_one_at_a_time_and_from_the_prefix_cache(captured: Engine) -> None:
    batch = facts(captured("generate", REQUESTS))
    hits = captured("prefix_hits")
    assert facts(captured("generate", REQUESTS)) == batch
    assert captured("prefix_hits") - hits >= len(REQUESTS)
    assert [facts(captured("generate", [r]))[0] for r in REQUESTS[:3]] == batch[:3]


def test_limits_on_what_is_drawn(captured: Engine, tiny: Path) -> None:
    limits = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05, "top_k": 9}]
    requests = [replace(request, **limits[at % 4]) for at, request in enumerate(REQUESTS)]
    batch = captured("generate", requests)
    assert [len(r.support.counts) for r in batch if r.support] == [40] * 18
    assert [r.logp_bits for r in batch] == response_bits(tiny, batch, [1.0] * len(batch), SEGMENTS, "cuda")
    assert facts(captured("generate", requests[:3])) == facts(batch)[:3]


def test_chunked_prefill_small_pages_and_preemption(home: Path, tiny: Path, captured: Engine) -> None:
    cramped = {"prefix_caching": False, "max_num_batched_tokens": 32, "block_size": 16, "kv_cache_gib": 1 / 1024}
    with hosted(home, "cramped", gpu_config(tiny, **cramped)) as engine:
        assert facts(engine("generate", REQUESTS)) == facts(captured("generate", REQUESTS))
        assert engine("preempted") > 0


def test_mixed_batches_in_one_graph(home: Path, tiny: Path, captured: Engine) -> None:
    config = gpu_config(tiny, prefix_caching=False, max_num_batched_tokens=32, block_size=16)
    with hosted(home, "whole", config, WholeGraphEngine) as engine:
        assert facts(engine("generate", REQUESTS)) == facts(captured("generate", REQUESTS))


def test_products_of_the_vendor_are_used_where_they_are_certified(home: Path, tiny: Path, captured: Engine) -> None:
    with hosted(home, "certified", gpu_config(tiny, prefix_caching=False, max_num_batched_tokens=96)) as engine:
        assert facts(engine("generate", REQUESTS)) == facts(captured("generate", REQUESTS))
        proof = engine("proof")[0]
    assert {c["m"] for c in proof["certificates"]} == {96}
    assert proof["certified_products"] > 0
