"""New weights go into every worker in place, under a version that the workers themselves hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hosted_engines import SEGMENTS, Engine, engine_config, hosted
from models import make_requests
from oracle import response_bits
from safetensors.torch import load_file, save_file

from samebits.bits import tree_digest
from samebits.contract.routes import ModuleRoutes
from samebits.timeline.types import ShardDigest, WeightVersion

REQUESTS = make_requests(6, tokens=12)
GREEDY = make_requests(4, tokens=8, temperature=0.0)


def expected_shards(model: Path, shards: list[ShardDigest]) -> list[str]:
    weights = load_file(model / "model.safetensors")
    return [tree_digest(weights[s.name].narrow(s.dim, s.start, s.stop - s.start)) for s in shards]


def covered(shards: list[ShardDigest], model: Path) -> bool:
    weights = load_file(model / "model.safetensors")
    ends: dict[str, set[int]] = {}
    for s in shards:
        ends.setdefault(s.name, set()).update(range(s.start, s.stop))
    dims = {s.name: s.dim for s in shards}
    return all(ends.get(name) == set(range(w.shape[dims[name]])) for name, w in weights.items())


@pytest.fixture(scope="module")
def native(home: Path, tiny: Path) -> Iterator[Engine]:
    """vLLM's own code in every module."""
    with hosted(home, "native", engine_config(tiny, case=ModuleRoutes("P", "P", "P"), contract={})) as engine:
        yield engine


def test_bits_follow_the_weights_and_the_prefix_cache_forgets(strict: Engine, tiny: Path, other: Path) -> None:
    before = strict("generate", REQUESTS)
    shards = strict("publish", str(other), WeightVersion(1, "one"))
    assert [s.digest for s in shards] == expected_shards(other, shards)
    assert covered(shards, other)
    during = strict("generate", REQUESTS)
    assert [r.logp_bits for r in during] == response_bits(other, during, [1.0] * 6, SEGMENTS)
    assert {r.version for r in during} == {WeightVersion(1, "one")}
    strict("publish", str(tiny), WeightVersion(2, "two"))
    after = strict("generate", REQUESTS)
    assert [(r.token_ids, r.logp_bits) for r in after] == [(r.token_ids, r.logp_bits) for r in before]


def test_an_incomplete_checkpoint_leaves_no_version(strict: Engine, tiny: Path, tmp_path: Path) -> None:
    weights = load_file(tiny / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"no weights for model\.norm\.weight"):
        strict("publish", str(tmp_path), WeightVersion(3, "three"))
    with pytest.raises(RuntimeError, match="do not hold one weight version"):
        strict("generate", REQUESTS)
    strict("publish", str(tiny), WeightVersion(4, "four"))
    assert strict("version") == WeightVersion(4, "four")


def test_an_empty_directory_is_named(strict: Engine, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no safetensors file in"):
        strict("publish", str(tmp_path), WeightVersion(5, "five"))
    strict("publish", str(tiny), WeightVersion(6, "six"))


def test_native_layers_really_run_the_published_weights(native: Engine, tiny: Path, other: Path) -> None:
    before = native("generate", GREEDY)
    shards = native("publish", str(other), WeightVersion(1, "one"))
    assert [s.digest for s in shards] == expected_shards(other, shards)
    assert [r.logp_bits for r in native("generate", GREEDY)] != [r.logp_bits for r in before]
    native("publish", str(tiny), WeightVersion(2, "two"))
    after = native("generate", GREEDY)
    assert [(r.token_ids, r.logp_bits) for r in after] == [(r.token_ids, r.logp_bits) for r in before]


def test_the_native_side_is_vllms_own_code_and_has_other_bits(native: Engine, tiny: Path) -> None:
    (record,) = native("proof")
    assert all(m["implementation"].startswith("vllm.") for m in record["modules"].values())
    assert all(m["route"] == "P" for m in record["modules"].values())
    assert record["patches"] == []
    rollouts = native("generate", REQUESTS)
    assert sum(record["counters"].values()) == 0
    assert [r.logp_bits for r in rollouts] != response_bits(tiny, rollouts, [1.0] * 6, SEGMENTS)
