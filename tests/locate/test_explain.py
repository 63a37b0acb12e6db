"""What is said about a difference besides where it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from samebits.locate.explain import hints_of
from samebits.locate.model import Decoder
from samebits.locate.sample import SideSample, SiteSample
from samebits.locate.session import Session
from samebits.testing.tiny_models import write_tiny_model
from samebits.trace import SideTrace, Token, sites


@pytest.mark.parametrize(("index", "hints"), [(0, 0), (1, 2)])
def test_position_0_is_not_turned_and_nothing_is_wrong_with_that(index: int, hints: int) -> None:
    site = next(one for one in sites(1, qk_norm=True, tied=False) if one.name == "rotary")
    row, other = torch.randn(16).bfloat16(), torch.randn(16).bfloat16()
    unturned = SideSample(
        {"q_normed": row, "k_normed": other}, {"q_turned": row.clone(), "k_turned": other.clone()}, {}
    )
    turned = SideSample(unturned.reads, {"q_turned": -row, "k_turned": -other}, {})
    sample = SiteSample(site=site, token=Token(0, index), trainer=unturned, rollout=turned, constants={})
    found = hints_of(sample, SideTrace(), SideTrace())
    assert len(found) == hints
    assert all("unchanged: nothing was computed there" in hint for hint in found)


def test_a_parameter_that_the_trainer_lacks_has_no_values_to_compare(tmp_path: Path) -> None:
    class Rollout:
        def weight(self, name: str) -> list[Any]:
            raise AssertionError(f"{name} is asked for, though there is nothing to compare it with")

    nobody: Any = Rollout()
    session = Session(nobody, nobody, Decoder.read(write_tiny_model(tmp_path / "model"), 1), tmp_path)
    assert session._weight_difference("model.layers.0.self_attn.q_proj.bias", {}) is None


@pytest.mark.parametrize("changes", [{"rope_parameters": [1]}, {"num_attention_heads": 0, "head_dim": None}])
def test_a_configuration_of_another_form_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    file = write_tiny_model(tmp_path / "model") / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ValueError, match="no configuration of a dense decoder"):
        Decoder.read(file.parent, 1)
