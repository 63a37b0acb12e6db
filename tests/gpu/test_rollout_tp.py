"""vLLM with two workers on two GPUs: the tokens and bits of one worker, eagerly and with graphs.

python -m pytest tests/gpu/test_rollout_tp.py
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "into_vllm"))

from hosted_engines import Engine, engine_config, hosted
from models import make_model, make_requests
from oracle import response_bits

from samebits.backends import device_arithmetic
from samebits.contract import run_contract
from samebits.timeline.types import Rollout

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices here"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
]
SEGMENTS = 2
SHAPE = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 1024,
}  # fmt: skip
REQUESTS = make_requests(64, tokens=80)


def tp_config(model: Path, **changes: Any) -> Any:
    from samebits.contract.boundaries import BOUNDARIES

    arithmetic = device_arithmetic(torch.device("cuda", 0))
    contract = run_contract(BOUNDARIES, segments=SEGMENTS, arithmetic=arithmetic).as_data()
    settings = {
        "device": "cuda", "contract": contract, "kv_cache_gib": 2.0, "max_model_len": 256, "max_num_seqs": 64, **changes
    }  # fmt: skip
    return engine_config(model, **settings)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu_rollout_tp")


@pytest.fixture(scope="module")
def model(home: Path) -> Path:
    return make_model(home / "model", **SHAPE)


@pytest.fixture(scope="module")
def one(home: Path, model: Path) -> Iterator[list[Rollout]]:
    with hosted(home, "one", tp_config(model)) as engine:
        yield engine("generate", REQUESTS)


@pytest.fixture(scope="module")
def two(home: Path, model: Path) -> Iterator[Engine]:
    with hosted(home, "two", tp_config(model, tp=2)) as engine:
        yield engine


def facts(rollouts: list[Rollout]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(r.token_ids, r.logp_bits) for r in rollouts]


def test_two_workers_with_graphs_give_the_bits_of_one(one: list[Rollout], two: Engine, model: Path) -> None:
    batch = two("generate", REQUESTS)
    assert sum(len(r.token_ids) for r in batch) >= 5000
    assert facts(batch) == facts(one)
    assert [r.logp_bits for r in batch] == response_bits(model, batch, [1.0] * len(batch), SEGMENTS, "cuda")


def test_sums_over_workers_are_ours_also_in_graphs(two: Engine) -> None:
    before = [proof["counters"] for proof in two("proof")]
    two("generate", REQUESTS[:4])
    for earlier, proof in zip(before, two("proof"), strict=True):
        assert proof["mode"] == "captured"
        for kernel in ("collectives.sum_small", "collectives.gather"):
            assert proof["counters"][kernel] > earlier[kernel], kernel


def test_the_comparison_can_fail(home: Path, two: Engine, model: Path) -> None:
    batch = two("generate", REQUESTS)
    # one segment: the same sums in another order
    other = response_bits(model, batch, [1.0] * len(batch), 1, "cuda")
    assert all(r.logp_bits != bits for r, bits in zip(batch, other, strict=True))


def test_two_eager_workers_give_the_bits_of_one(home: Path, model: Path, one: list[Rollout]) -> None:
    with hosted(home, "two_eager", tp_config(model, tp=2, graphs=False)) as engine:
        assert facts(engine("generate", REQUESTS)) == facts(one)
