"""Processes tell each other by what they compute, and a difference is named field by field."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samebits.cli.wiring import build_trainer
from samebits.contract import RunContract, digest_of, held_contract, model_constants, refusal, run_contract
from samebits.contract.boundaries import BOUNDARIES
from samebits.into_megatron.config import TrainerConfig
from samebits.rl.checks import check_contracts
from samebits.rl.processes import Group
from samebits.rl.protocols import RunFailed
from samebits.rl.sides import TrainerGroup
from samebits.testing.tiny_models import write_tiny_model

SHAPE = {"hidden_size": 64, "rms_norm_eps": 1e-6, "architectures": ["A"], "rope_parameters": {"rope_theta": 1e4}}
CASES = {"attention": "R/R", "ffn": "R/R", "logp": "R/R"}

PEER = """
import dataclasses
from samebits.contract import digest_of, held_contract
from samebits.contract import boundaries

OTHER = {other}

def proof():
    own = [dataclasses.replace(b, **OTHER.get(b.name, {{}})) for b in boundaries.BOUNDARIES]
    content = held_contract({agreed!r}, own, segments=2)
    modules = {{"norm": {{"group": "attention", "route": "R"}}}}
    return {{"role": "trainer", "rank": {rank}, "contract": digest_of(content), "contract_content": content,
            "modules": modules}}
"""


def agreed() -> RunContract:
    return run_contract(BOUNDARIES, segments=2, model={**model_constants(SHAPE), "temperature": 1.0})


def test_a_process_that_computes_the_same_holds_the_same() -> None:
    held = held_contract(agreed().as_data(), BOUNDARIES, segments=2, model=model_constants(SHAPE))
    assert digest_of(held) == agreed().digest()
    assert refusal("me", agreed().as_data(), held) == ""


OWN = {
    "segments": ({"segments": 4}, "  segments: 2 | 4"),
    "model": ({"model": {"rms_norm_eps": 1e-5}}, "  model.rms_norm_eps: '1e-06' | '1e-05'"),
    "version": (
        {"boundaries": [dataclasses.replace(BOUNDARIES[0], version=7), *BOUNDARIES[1:]]},
        f"  boundaries.{BOUNDARIES[0].name}.version: {BOUNDARIES[0].version} | 7",
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_what_a_process_holds_is_its_own_and_not_what_it_was_told(name: str) -> None:
    changes, line = OWN[name]
    settings: dict[str, Any] = {"boundaries": BOUNDARIES, "segments": 2, "model": model_constants(SHAPE), **changes}
    held = held_contract(agreed().as_data(), settings.pop("boundaries"), **settings)
    text = refusal("trainer-3", agreed().as_data(), held)
    head, *lines = text.split("\n")
    assert lines == [line]
    assert head.startswith(f"trainer-3 holds run contract {digest_of(held)[:12]}, the run is under")


def test_a_boundary_that_is_missing_is_named() -> None:
    held = held_contract(agreed().as_data(), BOUNDARIES[1:], segments=2)
    (line,) = refusal("me", agreed().as_data(), held).split("\n")[1:]
    assert line.startswith(f"  boundaries.{BOUNDARIES[0].name}: {{'name'")
    assert line.endswith(" | none")


def test_long_texts_show_what_surrounds_their_first_difference() -> None:
    merge = "a" * 300 + "ascending" + "b" * 300
    text = refusal("me", {"merge": merge}, {"merge": merge.replace("ascending", "descending")})
    assert text.split("\n")[1] == f"  merge: …{'a' * 20}ascending{'b' * 31}… | …{'a' * 20}descending{'b' * 30}…"


def test_many_fields_are_counted() -> None:
    left, right = ({f"f{at:02}": side for at in range(20)} for side in (1, 2))
    lines = refusal("me", left, right).split("\n")
    assert lines[1] == "  f00: 1 | 2"
    assert lines[-1] == "  and 8 more fields"


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """Two processes; the second computes attention in other chunks."""
    monkeypatch.syspath_prepend(str(tmp_path))
    other = {"attention": {"constants": {"tile": 64, "chunk": 1024}}}
    for rank, changes in enumerate(({}, other)):
        text = PEER.format(agreed=agreed().as_data(), rank=rank, other=changes)
        (tmp_path / f"peer{rank}.py").write_text(text)
    group = Group(["trainer rank 0", "trainer rank 1"], tmp_path)
    group.gather("start", group.start(importlib.import_module, [("peer0",), ("peer1",)]), 60)
    yield group
    group.kill()


def test_a_process_that_holds_another_contract_is_refused_with_the_field(ranks: Group) -> None:
    records = TrainerGroup(ranks, 60).proof()
    check_contracts(records[:1], CASES, agreed())
    with pytest.raises(RunFailed, match=r"^trainer-1 holds run contract (.|\n)*\n  boundaries\.attention\.constants\."):
        check_contracts(records, CASES, agreed())
    with pytest.raises(RunFailed, match=r"chunk: 512 \| 1024\n"):
        check_contracts(records[1:], CASES, agreed())


def test_a_trainer_needs_the_digest_of_the_contract_that_it_is_given() -> None:
    with pytest.raises(ValueError, match=f"contract: none is not the digest .* {agreed().digest()[:12]}; give both"):
        TrainerConfig(model="m", agreed=agreed().as_data())


def test_a_trainer_rank_refuses_to_start_under_another_contract(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    contract = run_contract(BOUNDARIES, segments=2, model={"rms_norm_eps": 0.125, "temperature": 0.5})
    config = TrainerConfig(model=str(tmp_path), max_tp=4, contract=contract.digest(), agreed=contract.as_data())
    group = Group(["trainer rank 0"], tmp_path)
    try:
        with pytest.raises(RunFailed, match="rank 0 failed during start: ValueError: trainer-0 holds run") as refused:
            group.gather("start", group.start(build_trainer, [(config, 0)]), 120)
    finally:
        group.kill()
    lines = str(refused.value).split("\n")[1:]
    assert [line.split(":")[0].strip() for line in lines] == ["model.rms_norm_eps", "model.temperature", "segments"]
