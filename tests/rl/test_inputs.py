"""What a run reads: found by path or preset, fingerprinted, and refused by name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from samebits.rl.config import RunConfig
from samebits.rl.inputs import model_constants, resolve_inputs, stop_ids


def test_the_preset_is_complete_and_fingerprinted() -> None:
    inputs = resolve_inputs(RunConfig())
    prints = inputs.fingerprints()
    assert inputs.reference == inputs.model
    assert prints["prompts"]["files"] == {"prompts.jsonl": hashlib.sha256(inputs.prompts.read_bytes()).hexdigest()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(prints["model"]["files"])
    assert stop_ids(inputs.model)


def test_no_evaluation_without_held_out_problems() -> None:
    assert resolve_inputs(RunConfig(eval_data="")).held_out is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"eos_token_id": 3}}, (3,)),
        ({"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": [4, 5]}}, (4, 5)),
        ({"config": {"eos_token_id": 3}, "generation_config": {}}, (3,)),
    ],
)
def test_the_generation_config_names_the_ends_first(tmp_path: Path, files: dict, expected: tuple) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert stop_ids(tmp_path) == expected


def test_a_model_without_an_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no eos_token_id"):
        stop_ids(tmp_path)


def test_the_contract_holds_what_changes_the_arithmetic_of_a_model(tmp_path: Path) -> None:
    shape = {"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 5.0}}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    constants = model_constants(tmp_path, RunConfig(temperature=0.5))
    assert (constants["rope_theta"], constants["temperature"], constants["architecture"]) == (
        5.0,
        0.5,
        "Qwen3ForCausalLM",
    )
