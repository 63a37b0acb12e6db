"""Tensor-parallel workers: the same bits as one worker, a proof from each, and a named death."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosted_engines import Engine, engine_config, hosted
from models import make_requests

from samebits.into_vllm.engine import EngineDied
from samebits.timeline.types import WeightVersion

REQUESTS = make_requests(12, tokens=24)


@pytest.fixture(scope="module")
def pair(home: Path, tiny: Path) -> Iterator[Engine]:
    with hosted(home, "pair", engine_config(tiny, tp=2)) as engine:
        sockets = Path(engine("sockets"))
        yield engine
    assert not sockets.exists()


def test_two_workers_give_the_bits_of_one(pair: Engine, strict: Engine) -> None:
    one, two = strict("generate", REQUESTS), pair("generate", REQUESTS)
    assert [(r.token_ids, r.logp_bits) for r in two] == [(r.token_ids, r.logp_bits) for r in one]


def test_every_worker_proves_its_own_routes(pair: Engine) -> None:
    records = pair("proof")
    assert [r["rank"] for r in records] == [0, 1]
    assert len({r["process"] for r in records}) == 2
    for record in records:
        assert all(m["route"] == "R" and m["calls"] > 0 for m in record["modules"].values())
        assert [p["in_place"] for p in record["patches"]] == [True]
        assert record["counters"]["rms_norm"] > 0


def test_workers_hold_complementary_shards(pair: Engine, strict: Engine) -> None:
    shards = pair("shards")
    spans = {(s.name, s.dim, s.start, s.stop) for s in shards}
    assert ("model.layers.0.self_attn.q_proj.weight", 0, 128, 256) in spans
    assert ("model.layers.0.self_attn.v_proj.weight", 0, 64, 128) in spans
    assert ("model.layers.0.mlp.down_proj.weight", 1, 48, 96) in spans
    assert ("lm_head.weight", 0, 128, 200) in spans
    whole = {s.name: s for s in strict("shards")}
    assert {s.name for s in shards} == set(whole)


def test_a_publication_reaches_both(pair: Engine, strict: Engine, tiny: Path, other: Path) -> None:
    for engine in (pair, strict):
        engine("publish", str(other), WeightVersion(1, "one"))
    one, two = strict("generate", REQUESTS), pair("generate", REQUESTS)
    assert [(r.token_ids, r.logp_bits, r.version) for r in two] == [(r.token_ids, r.logp_bits, r.version) for r in one]
    for engine in (pair, strict):
        engine("publish", str(tiny), WeightVersion(2, "two"))


def test_sockets_lie_in_a_folder_of_the_engine(pair: Engine) -> None:
    assert any(path.is_socket() for path in Path(pair("sockets")).iterdir())


def test_a_killed_worker_is_named(pair: Engine) -> None:
    os.kill(pair("worker_pids")[1], signal.SIGKILL)
    with pytest.raises(EngineDied, match=r"worker 1 \(pid \d+, exit code -9\) died during"):
        pair("generate", REQUESTS)
