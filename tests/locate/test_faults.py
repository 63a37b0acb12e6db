"""Planted faults in the real vLLM and the real Megatron-Core: each is found where it was planted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hosted_sides import Pair

from samebits.evidence.verdict import Verdict
from samebits.locate.repro import write_repro


class Planted(NamedTuple):
    """A fault, the side it is planted on, and where it must be found."""

    side: str
    fault: str
    site: str
    layer: int
    kind: str
    index: int | None = None  # where the first token that shows it is known
    hint: str = ""
    guilty: bool = True  # whether the contract's op, on recorded values, says which side is wrong


PLANTED = (
    Planted("rollout", "epsilon_of_one_norm", "MLP norm", 1, "operator"),
    Planted("rollout", "swapped_pages", "KV cache", 1, "KV cache", 0, "the key of position 16", guilty=False),
    Planted("rollout", "rotary_base", "rotary", 0, "parameter", 1, ""),
    Planted("rollout", "stale_weight", "down projection", 1, "weights", guilty=False),
    Planted("rollout", "stale_norm_weight", "input norm", 1, "weights", guilty=False),
    Planted("rollout", "bf16_logits", "LM head", 2, "operator", 24, "every value of logits is a bfloat16 value"),
    Planted("rollout", "later_positions", "rotary", 0, "position ids", 12, guilty=False),
    Planted("rollout", "other_token", "embedding", -1, "input ids", 9, guilty=False),
    Planted("rollout", "head_in_two_segments", "LM head", 2, "operator", 24),
    Planted("trainer", "native_swiglu", "SwiGLU", 0, "operator"),
    Planted("trainer", "temperature", "log-probability", 2, "temperature", 24, guilty=False),
    Planted("trainer", "no_query_norm", "q norm", 1, "operator", 0, "q_normed is q unchanged"),
    Planted("trainer", "one_k_segment", "output projection", 0, "parameter"),
    Planted("trainer", "one_k_segment_behind_its_back", "down projection", 1, "operator"),
    Planted("trainer", "blind_to_itself", "attention", 1, "operator", 1),
    Planted("trainer", "attention_scale", "attention", 1, "parameter", 1),
    Planted("trainer", "swapped_gate_and_up", "gate/up projection", 0, "operator", 0, "the two are swapped"),
    Planted("trainer", "score_one_step_off", "log-probability", 2, "operator", 24),
    Planted("trainer", "embedding_of_a_neighbour", "embedding", -1, "operator"),
)


def check(pair: Pair, planted: Planted) -> Any:
    with pair.fault(planted.side, planted.fault):
        answered = pair.locate()
    found = answered.located
    assert found.verdict is Verdict.DIFFERENT, found
    assert found.where is not None
    where = found.where
    assert (where.site, where.layer, found.kind) == (planted.site, planted.layer, planted.kind), found
    assert planted.index in (None, where.index), found
    assert planted.hint in " ".join(found.hints), found
    if planted.guilty:
        assert found.trainer is not None
        assert found.rollout is not None
        right = {"trainer": found.trainer.gives_the_contract, "rollout": found.rollout.gives_the_contract}
        assert right == {"trainer": planted.side != "trainer", "rollout": planted.side != "rollout"}, found
    return answered


def test_without_a_fault_everything_agrees(pair: Pair) -> None:
    found = pair.locate().located
    assert found.verdict is Verdict.SAME
    assert found.not_compared == ()
    assert found.tokens_compared >= 40


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.fault)
def test_a_fault_is_found_where_it_was_planted(pair: Pair, planted: Planted) -> None:
    check(pair, planted)
    assert pair.locate().located.verdict is Verdict.SAME


def test_the_repro_shows_the_difference_without_an_engine(pair: Pair, tmp_path: Path) -> None:
    answered = check(pair, next(one for one in PLANTED if one.fault == "epsilon_of_one_norm"))
    test = write_repro(tmp_path, answered.located, answered.sample)
    outcome = outcomes(test)
    assert outcome == {
        "test_both_sides_read_the_same": "passed",
        "test_both_sides_hold_the_same_weights": "passed",
        "test_both_sides_write_the_same": "failed",
        "test_the_trainer_gives_the_bits_of_the_contract": "passed",
        "test_the_rollout_side_gives_the_bits_of_the_contract": "failed",
    }
    assert json.loads((tmp_path / "repro.json").read_text())["site"] == "MLP norm"


def test_the_repro_of_a_weight_shows_the_weight(pair: Pair, tmp_path: Path) -> None:
    answered = check(pair, next(one for one in PLANTED if one.fault == "stale_norm_weight"))
    weight = answered.located.weight
    assert weight is not None
    assert (weight.name, weight.index) == ("model.layers.1.input_layernorm.weight", (7,))
    assert (weight.values.count, weight.values.first.ulps) == (1, 1)
    outcome = outcomes(write_repro(tmp_path, answered.located, answered.sample))
    assert [name for name, word in outcome.items() if word == "failed"] == [
        "test_both_sides_hold_the_same_weights",
        "test_both_sides_write_the_same",
    ]


def outcomes(test: Path) -> dict[str, str]:
    """Test -> passed or failed, from pytest in a process that imports neither engine."""
    command = [sys.executable, "-m", "pytest", str(test), "-v", "-p", "no:cacheprovider", "--rootdir", str(test.parent)]
    ran = subprocess.run([*command, "-c", os.devnull], capture_output=True, text=True, check=False)
    found = re.findall(r"::(test_\w+) (PASSED|FAILED)", ran.stdout)
    assert found, ran.stdout + ran.stderr
    return {name: word.lower() for name, word in found}
