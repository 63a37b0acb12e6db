"""The configuration: one door, flags over file over defaults, and every wrong key named with the nearest right one."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.contract.routes import MODULES
from samebits.rl.config import RunConfig, load_config, to_toml


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('lr = 2\nnum-rollout = 3\ncase = "P/P"\n')
    config = load_config({"num_rollout": 5}, file)
    assert (config.lr, config.num_rollout, config.case, config.seed) == (2.0, 5, "P/P", 1234)


@given(
    text=st.text(alphabet=string.printable + "é\u2028\x7f", min_size=1, max_size=20),
    lr=st.floats(min_value=1e-300, max_value=1e300),
    seed=st.integers(0, 2**63 - 1),
)
def test_the_printed_configuration_reads_back(tmp_path_factory, text: str, lr: float, seed: int) -> None:
    config = RunConfig(run_dir=text, lr=lr, seed=seed, logp_case="P/R", max_tp=4, eval_data="")
    file = tmp_path_factory.mktemp("c") / "printed.toml"
    file.write_text(to_toml(config), encoding="utf-8", newline="")
    assert load_config({}, file) == config


def test_the_printed_configuration_explains_every_setting() -> None:
    lines = to_toml(RunConfig()).splitlines()
    assert [line.removeprefix("# ").split()[0] for line in lines] == list(RunConfig.model_fields)
    for line, field in zip(lines, RunConfig.model_fields.values(), strict=True):
        assert field.description
        assert line.endswith(f"  # {field.description}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_rolout": 3}, "unknown key 'num_rolout'; did you mean 'num_rollout'?"),
        ({"learning_rate": 3}, "unknown key 'learning_rate'; did you mean 'lr'?"),
        ({"lora": 3}, "unknown key 'lora'; known: case, "),
        ({"case": "X/Y"}, "got 'X/Y'$"),
        ({"zzz": 3}, "unknown key 'zzz'; known: case, "),
        ({"device": "gpu"}, "device: Input should be 'cpu' or 'cuda', got 'gpu'"),
        ({"weight_transfer": "cuda_ipc"}, "weight_transfer cuda_ipc needs both sides on GPUs"),
        ({"case": "R-R"}, "case: Input should be .* got 'R-R'; did you mean 'R/R'?"),
        ({"ffn_case": "p/r"}, "ffn_case: .* did you mean 'P/R'?"),
        ({"num_rollout": 0}, "num_rollout: .* greater than or equal to 1, got 0"),
        ({"num_rollout": "3"}, "num_rollout: .* valid integer, got '3'"),
        ({"num_rollout": True}, "num_rollout: .* valid integer, got True"),
        ({"lr": float("nan")}, "lr: .*"),
        ({"lr": float("inf")}, "lr: .*finite"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0: a greedy token is certain"),
        ({"temperature": 1e-45}, "temperature 1e-45 is below 0.01"),
        ({"run_dir": ""}, "run_dir: .* at least 1 character"),
        ({"replay_tokens": ""}, "replay_tokens: .* at least 1 character"),
        ({"temperature": -1.0}, "temperature must be positive, got -1.0"),
        ({"top_p": 0.0}, "top_p: .* greater than 0, got 0.0"),
        ({"top_p": 1.1}, "top_p: .* less than or equal to 1, got 1.1"),
        ({"min_p": -0.1}, "min_p: .* greater than or equal to 0"),
        ({"top_k": -1}, "top_k: .* greater than or equal to 0"),
        ({"top_p": 1 - 1e-9}, "limits nothing once it is rounded to fp32"),
        ({"top_k": 5, "case": "P/P"}, "top_k, top_p and min_p need logp_case R/R"),
        ({"min_p": 0.1, "logp_case": "R/P"}, "top_k, top_p and min_p need logp_case R/R"),
        ({"top_k": 5, "strict_gradients": True}, "strict_gradients does not cover .* that top_k"),
        ({"global_batch_size": 10}, "global_batch_size 10 is not a multiple of samples_per_prompt 8"),
        ({"train_tp": 2, "max_tp": 1}, "max_tp 1 is not a multiple of train_tp 2"),
        ({"train_tp": 3}, "train_tp 3 is not a power of two: .* the nearest that work: 2 and 4"),
        ({"rollout_tp": 6}, "rollout_tp 6 is not a power of two: .* the nearest that work: 4 and 8"),
        ({"num_rollout": 31251}, "are 2,000,064 responses, and the records of a run hold 2,000,000: make several"),
        ({"max_num_batched_tokens": 32}, "max_num_batched_tokens 32 is below max_num_seqs 64"),
        ({"max_tp": 12}, "max_tp 12 is not a power of two: .* the nearest that work: 8 and 16"),
        ({"rollout_engines": 65}, "rollout_engines 65 exceeds the 64 samples per step"),
        ({"native_compile": True}, "native_compile is for a native rollout side"),
        ({"lr": -1.0, "num_rollout": -1}, "num_rollout: .*; lr: .*"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        load_config(settings)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"lr = ", "not valid TOML"),
        (b"\xff", "not valid TOML"),
        (b"top-k = 1\ntop_k = 2\n", "sets top_k twice, with a dash and without"),
        (b"learning_rate = 1\n", "unknown key 'learning_rate'"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "job.toml"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_config({}, file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the configuration .*job\.toml: No such file"):
        load_config({}, tmp_path / "job.toml")


def test_a_module_may_have_a_case_of_its_own() -> None:
    config = RunConfig(case="R/R", ffn_case="P/R")
    assert config.cases == {"attention": "R/R", "ffn": "P/R", "logp": "R/R"}
    assert config.routes("trainer") == {"attention": "R", "ffn": "P", "logp": "R"}
    assert config.routes("rollout") == dict.fromkeys(MODULES, "R")


def test_segments_follow_the_larger_side() -> None:
    assert RunConfig(train_tp=2, rollout_tp=4).segments == 4
    assert RunConfig(train_tp=2, max_tp=8).segments == 8
