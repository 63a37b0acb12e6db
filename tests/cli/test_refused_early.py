"""What a run cannot do is refused before its directory exists, in words that name the setting."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from samebits.cli.main import app
from samebits.cli.wiring import parts
from samebits.matrix.model import write_model
from samebits.rl.config import RunConfig, load_config
from samebits.rl.inputs import PRESETS, resolve_inputs
from samebits.rl.job import run_job
from samebits.rl.recorded import RecordedTokens
from samebits.testing.runs import write_run
from samebits.testing.tiny_models import write_tiny_model
from samebits.timeline.types import Prompt

SMALL = {"global_batch_size": 4, "samples_per_prompt": 4, "eval_interval": 0}


def refused(tmp_path: Path, **settings: Any) -> str:
    """The sentence by which a run of one problem is refused; nothing may lie in its directory afterwards."""
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1+1?", "label": "2"}\n')
    own = {"run_dir": str(tmp_path / "run"), "prompt_data": str(tmp_path / "problems.jsonl")}
    with pytest.raises(ValueError, match=r".") as caught:
        run_job(load_config({**SMALL, **own, **settings}), parts())
    assert not (tmp_path / "run").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"linear_logp_provider": "absent"}, "'absent' is no dotted path, and nothing is registered under that name"),
        ({"linear_logp_provider": "math.absent"}, "module math has no 'absent'; want package.module.name"),
        ({"linear_logp_provider": "math.pi"}, "provider 'math.pi' must be callable, got float"),
        (
            {"linear_logp_provider": "absent", "linear_logp_provider_mode": "auto"},
            "'absent' is no dotted path",
        ),
        (
            {"linear_logp_provider": "absent", "linear_logp_provider_mode": "audit", "case": "P/P"},
            "'absent' is no dotted path",
        ),
        (
            {"reward": "absent_module.score"},
            "reward: ModuleNotFoundError: No module named 'absent_module'; want",
        ),
        ({"reward": "math.absent"}, "reward: AttributeError"),
        ({"reward": "math.pi"}, "reward 'math.pi' must be a function of a response and its label, got 3.14"),
        ({"temperature": 2.5}, "temperature 2.5 is above 2, the highest that vLLM serves"),
        ({"kv_cache_gib": 0.001}, "kv_cache_gib 0.001: one sequence of .* = 576 tokens needs 0.002"),
    ],
)
def test_a_setting_that_cannot_work(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    found = refused(tmp_path, **settings)
    assert all(part in found for part in message.split(" .* "))


def test_a_provider_that_breaks_while_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_provider.py").write_text("raise LookupError('no such chip')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "LookupError: no such chip" in refused(tmp_path, linear_logp_provider="broken_provider.score")


def wider(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 2 * config["intermediate_size"]}))


def deeper(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}))


def in_fp32(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    save_file({name: tensor.float() for name, tensor in weights.items()}, model / "model.safetensors")


def cut_short(model: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def without_files(model: Path) -> None:
    (model / "model.safetensors").rename(model / "other.safetensors")
    (model / "model.safetensors.index.json").write_text("{}")


CHECKPOINTS = {
    wider: "model.layers.0.mlp.gate_proj.weight: expected bfloat16 [768, 128], got bfloat16 [384, 128]",
    deeper: "tensors are missing: model.layers.4.input_layernorm.weight",
    in_fp32: "got float32 [512, 128]; convert the checkpoint to bfloat16",
    cut_short: "model.safetensors: not a readable safetensors file",
    without_files: "model.safetensors.index.json names no files",
}


@pytest.mark.parametrize("change", CHECKPOINTS)
@pytest.mark.parametrize("setting", ["model", "reference_checkpoint"])
def test_weights_that_are_not_the_model_s(tmp_path: Path, setting: str, change: Any) -> None:
    shutil.copytree(resolve_inputs(RunConfig()).model, tmp_path / "model")
    change(tmp_path / "model")
    assert CHECKPOINTS[change] in refused(tmp_path, **{setting: str(tmp_path / "model")})


ODD_VALUES = {
    "architectures": (5, True, [["Qwen3ForCausalLM"]]),
    "num_hidden_layers": ("2", 0),
    "num_attention_heads": ("2", 2.5),
    "num_key_value_heads": ("2", -1),
    "head_dim": ("2", []),
    "intermediate_size": ("2", True),
    "max_position_embeddings": ("2", {}, None),
    "rope_theta": ([], {}),
    "rope_parameters": (5, ["x"], {"rope_theta": []}),
    "layer_types": (5, [["full_attention"]]),
}


@pytest.mark.parametrize("name", ODD_VALUES)
def test_a_model_s_configuration_of_another_form(tmp_path: Path, name: str) -> None:
    words = {"architectures": "architecture", "rope_parameters": "rope_", "layer_types": "sliding"}.get(name, name)
    model = write_model(tmp_path / "model", {"vocab_size": 512}, PRESETS / "arithmetic/model")
    shape = json.loads((model / "config.json").read_text())
    for value in ODD_VALUES[name]:
        (model / "config.json").write_text(json.dumps({**shape, name: value}))
        assert words in refused(tmp_path, model=str(model), max_prompt_length=64)


@pytest.mark.parametrize("file", [3, None, ["x"]])
def test_an_index_that_names_no_files(tmp_path: Path, file: object) -> None:
    model = write_model(tmp_path / "model", {"vocab_size": 512}, PRESETS / "arithmetic/model")
    (model / "model.safetensors").rename(model / "part.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    assert "names no files" in refused(tmp_path, model=str(model), max_prompt_length=64)


ELSEWHERE = {
    ("ablate", "--kv-cache-gib", "0.001", "--arm", "M000"): "kv_cache_gib 0.001: one sequence",
    ("ablate", "--train-cp", "2", "--arm", "M000"): "no context parallelism",
    ("locate", "--trainer-model", "preset:arithmetic", "--trainer-tp", "3"): "train_tp 3 is not a power of two",
    ("locate", "--trainer-model", "preset:arithmetic", "--trainer-case", "ffn=R,ffn=P"): "module=route, each once",
    ("locate", "--trainer-model", "preset:arithmetic", "--temperature", "5"): "temperature 5.0 is above 2",
    (
        "locate",
        "--trainer-model",
        "preset:arithmetic",
        "--prompt-ids",
        "5,512",
    ): "token id 512 is beyond the vocabulary",
    ("locate", "--trainer-model", "preset:arithmetic", "--max-tokens", "5000"): "exceed the model's 1024 positions",
}


@pytest.mark.parametrize("words", ELSEWHERE)
def test_ablations_and_traces_leave_no_folder_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    for command in ("ablate", "locate"):  # signals are this process's own
        monkeypatch.setattr(f"samebits.cli.{command}.prepare", lambda: None)
    folder = "--run-dir" if words[0] == "ablate" else "--out"
    done = CliRunner().invoke(app, [*words, folder, str(tmp_path / "out")])
    assert done.exit_code == 2
    assert ELSEWHERE[words] in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--max-tokens", "3"),
        ("run", "--trainer-model", "x"),
        ("--trainer-model", "x", "--token", "3"),
        ("--trainer-model", "x", "--prompt-ids", "5", "--prompt", "Hello"),
        ("--trainer-model", "x", "--response-ids", "5", "--seed", "3"),
        ("--trainer-model", "x", "--response-ids", "5", "--max-tokens", "3"),
    ],
)
def test_an_option_of_locate_that_would_be_idle(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["locate", *words])
    assert done.exit_code == 2
    assert f"{words[-2]} means nothing" in done.stderr


OTHER_SIZES = {
    "num_hidden_layers": "layers 2, the rollout side's 3",
    "intermediate_size": "ffn 96, the rollout side's 3",
}


@pytest.mark.parametrize("size", OTHER_SIZES)
def test_models_of_other_sizes_have_nothing_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    monkeypatch.setattr("samebits.cli.locate.prepare", lambda: None)
    models = [write_tiny_model(tmp_path / "a"), write_tiny_model(tmp_path / "b", **{size: 3})]
    words = ["--trainer-model", str(models[0]), "--rollout-model", str(models[1]), "--prompt-ids", "1,2"]
    done = CliRunner().invoke(app, ["locate", *words, "--out", str(tmp_path / "out")])
    assert (done.exit_code, (tmp_path / "out").exists()) == (2, False)
    assert OTHER_SIZES[size] in done.stderr


@pytest.mark.parametrize("text", ["[1]", "{}", '{"config": {}, "contract": {"content": {}}, "inputs": {"model": 1}}'])
def test_a_manifest_that_is_none_is_no_run_to_locate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr("samebits.cli.locate.prepare", lambda: None)
    write_run(tmp_path / "run")
    (tmp_path / "run/manifest.json").write_text(text)
    done = CliRunner().invoke(app, ["locate", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert "manifest.json is no manifest of a run" in done.stderr


def test_a_folder_is_no_name_of_a_benchmark_s_files() -> None:
    done = CliRunner().invoke(app, ["bench", "cpu", "--out", "."])
    assert (done.exit_code, "give the name of its files too" in done.stderr) == (2, True)


class Recorded:
    """The prompts of a written run's steps, or others."""

    def __init__(self, first: tuple[int, ...] = (5, 6, 7)) -> None:
        self.first = first

    def batch(self, step: int, count: int, seed: int) -> tuple[Prompt, ...]:
        return tuple(Prompt(index=i, token_ids=self.first, label="", text="") for i in range(count))


def test_recorded_tokens_that_do_not_fit_the_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    config = RunConfig(num_rollout=2, global_batch_size=6, samples_per_prompt=3)
    RecordedTokens(tmp_path / "run", config, Recorded())
    for changed, prompts, message in (
        ({}, Recorded((5, 6)), "sample 1/0/0 has no recorded response to this prompt"),
        ({"global_batch_size": 9}, Recorded(), "sample 1/2/0 has no recorded response"),
        ({"max_response_length": 3}, Recorded(), "sample 1/0/2 has 4 recorded tokens, at most 3 fit"),
        ({"num_rollout": 3}, Recorded(), "holds 2 steps, num_rollout is 3"),
    ):
        with pytest.raises(ValueError, match=message):
            RecordedTokens(tmp_path / "run", config.model_copy(update=changed), prompts)
