"""Verifying a run: a good one passes from its records alone, and every tampering is named."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tampering import STEP, edit_config, edit_json, edit_lines, edit_route, find, flip, reseal, sign_step, tensor_at

import samebits
from samebits.evidence.store import RunDirectory
from samebits.evidence.verdict import Verdict
from samebits.evidence.verify import verify
from samebits.testing.runs import write_run


def test_a_good_run_is_same(run: Path) -> None:
    found = verify(run)
    assert (found.verdict, found.problems) == (Verdict.SAME, ())
    assert found.totals["compared_tokens"] == 36
    assert found.totals["mismatch_count"] == 0
    assert found.totals["max_abs_diff"] == 0.0


@pytest.mark.parametrize("case", ["R/R", "P/P", "R/P", "P/R"])
def test_a_run_with_mismatches_is_different(tmp_path: Path, case: str) -> None:
    summary = write_run(tmp_path / "run", case=case, flips={(1, 0), (2, 3), (2, 5)})
    found = verify(tmp_path / "run")
    assert (found.verdict, found.problems) == (Verdict.DIFFERENT, ())
    assert found.totals == summary
    assert summary["mismatch_count"] == 3
    assert summary["steps_with_mismatch"] == 2
    assert 0 < summary["mean_abs_diff"] < summary["max_abs_diff"] < 1e-5
    assert summary["worst"] is not None


def test_report_and_logs_may_change_after_the_seal(run: Path) -> None:
    (run / "report.html").write_text("anything")
    (run / "logs" / "engine.log").write_text("anything")
    assert verify(run).verdict is Verdict.SAME


def test_an_unsealed_run_cannot_tell_but_shows_what_it_holds(tmp_path: Path) -> None:
    write_run(tmp_path / "run", seal=False)
    found = verify(tmp_path / "run")
    assert found.verdict is Verdict.CANNOT_TELL
    assert "not sealed" in found.problems[0]
    assert found.totals["compared_tokens"] == 36


@pytest.mark.parametrize("what", ["nothing", "empty", "file"])
def test_a_directory_without_a_run(tmp_path: Path, what: str) -> None:
    path = tmp_path / "run"
    if what == "empty":
        path.mkdir()
    if what == "file":
        path.write_text("")
    found = verify(path)
    assert found.verdict is Verdict.CANNOT_TELL
    assert ("holds no run" if what == "empty" else "not a directory") in found.problems[0]


# Tampering that leaves the seal alone: caught by digests.
UNSIGNED = {
    "bit of the sidecar": (lambda run: flip(run / STEP, -1), f"{STEP} was changed"),
    "bit of the timeline": (lambda run: flip(run / "timeline.jsonl", 30), "timeline.jsonl was changed"),
    "summary edited": (
        lambda run: edit_json(run / "summary.json", lambda s: s.update(mismatch_count=0, steps=200)),
        "summary.json was changed",
    ),
    "line deleted": (lambda run: edit_lines(run, lambda lines: lines.pop(5)), "timeline.jsonl was changed"),
    "manifest edited": (
        lambda run: edit_json(run / "manifest.json", lambda m: m["config"].update(case="P/P")),
        "manifest.json is not the one that was sealed",
    ),
    "seal removed": (lambda run: (run / "seal.json").unlink(), "not sealed"),
    "seal of another schema": (
        lambda run: edit_json(run / "seal.json", lambda s: s.update(schema="samebits.seal/2")),
        "seal.json: schema",
    ),
    "seal is no JSON": (lambda run: (run / "seal.json").write_text("{"), "seal.json is not valid JSON"),
    "seal is a list": (lambda run: (run / "seal.json").write_text("[]"), "not a JSON object"),
    "sidecar removed": (lambda run: (run / STEP).unlink(), f"{STEP} is missing"),
    "route removed": (lambda run: next((run / "routes").iterdir()).unlink(), "is missing"),
    "file added": (lambda run: (run / "steps/extra").write_text("x"), "steps/extra is not listed"),
    "sidecar truncated": (lambda run: os.truncate(run / STEP, 100), f"{STEP} was changed"),
    "sidecar is a link": (
        lambda run: ((run / STEP).rename(run / "logs/x"), (run / STEP).symlink_to("../logs/x")),
        "is a symbolic link",
    ),
}


@pytest.mark.parametrize("name", UNSIGNED)
def test_tampering_is_caught_by_the_seal(run: Path, name: str) -> None:
    tamper, message = UNSIGNED[name]
    tamper(run)
    found = verify(run)
    assert found.verdict is Verdict.CANNOT_TELL
    assert message in found.problems[0]


def edit_inputs(run: Path, **inputs: str | None) -> None:
    edit_json(run / "manifest.json", lambda m: (m.update(inputs=inputs), m["after"].update(inputs=inputs)))


def keep_model(run: Path, **changes: object) -> None:
    """As if the run had kept its model, with one file; `changes` override what the manifest says of it."""
    (run / "model").mkdir()
    (run / "model/config.json").write_text("{}")
    files = {"config.json": hashlib.sha256(b"{}").hexdigest()}
    saved = {"version": 2, "digest": "w2", "files": files, **changes}
    edit_json(run / "manifest.json", lambda m: (m.update(saved=saved), m["config"].update(save_model=True)))


def test_a_model_that_was_kept(run: Path) -> None:
    """It may be moved away."""
    keep_model(run)
    reseal(run)
    assert verify(run).verdict is Verdict.SAME, verify(run).problems
    shutil.rmtree(run / "model")
    assert verify(run).verdict is Verdict.SAME, verify(run).problems


def move(lines: list[dict]) -> None:
    sampled = [at for at, line in enumerate(lines) if line["kind"] == "sampled"]
    lines[sampled[0]], lines[sampled[1]] = lines[sampled[1]], lines[sampled[0]]


# Tampering by someone who signs anew: caught because the records must agree with each other.
SIGNED = {
    "trainer value flipped": (
        lambda run: flip(run / STEP, tensor_at(run / STEP, "trainer_logp")),
        "is not the file that the timeline recorded",
    ),
    "line deleted": (lambda run: edit_lines(run, lambda lines: lines.pop(5)), "seq is 6, want 5"),
    "lines swapped": (lambda run: edit_lines(run, move), "a line is missing or out of place"),
    "version swapped": (
        lambda run: edit_lines(run, lambda lines: find(lines, "sampled").update(version=0)),
        "carries version 0",
    ),
    "counts claimed": (
        lambda run: edit_lines(run, lambda lines: find(lines, "compared").update(mismatch_count=1)),
        "mismatch_count is 0, the timeline claims 1",
    ),
    "worst claimed": (
        lambda run: edit_lines(run, lambda lines: find(lines, "compared").update(worst="2/0/0@0")),
        "worst token is None",
    ),
    "reward edited": (
        lambda run: edit_lines(run, lambda lines: find(lines, "sampled").update(reward=1.0)),
        "reward or advantage",
    ),
    "prompt renamed": (
        lambda run: edit_lines(run, lambda lines: find(lines, "sampled").update(prompt=9)),
        "its samples are not those of the timeline",
    ),
    "sidecar renamed": (
        lambda run: edit_lines(run, lambda lines: find(lines, "compared").update(sidecar="../x")),
        "its sidecar is named '../x'",
    ),
    "summary edited": (
        lambda run: edit_json(run / "summary.json", lambda s: s.update(tokens_per_second=1e6)),
        "summary.json: tokens_per_second is 1000000.0",
    ),
    "summary extended": (
        lambda run: edit_json(run / "summary.json", lambda s: s.update(extra=1)),
        "summary.json: extra is 1",
    ),
    "case relabelled": (
        lambda run: edit_json(run / "manifest.json", lambda m: m["config"].update(case="P/P")),
        "the timeline ran case",
    ),
    "contract relabelled": (
        lambda run: edit_json(run / "manifest.json", lambda m: m["contract"]["content"].update(segments=2)),
        "does not have the contract's digest",
    ),
    "inputs changed during the run": (
        lambda run: edit_json(run / "manifest.json", lambda m: m["after"].update(inputs={"model": "other"})),
        "inputs changed during the run",
    ),
    "source not recorded": (
        lambda run: edit_json(run / "manifest.json", lambda m: m.pop("source")),
        "source changed during the run, or was not recorded at both ends",
    ),
    "nothing recorded at the end": (
        lambda run: edit_json(run / "manifest.json", lambda m: m.pop("after")),
        "after is missing",
    ),
    "steps relabelled": (
        lambda run: edit_json(run / "manifest.json", lambda m: m["config"].update(num_rollout=3)),
        "config.num_rollout is 3",
    ),
    "half a case": (
        lambda run: (
            edit_config(run, case="R/R/R"),
            edit_lines(run, lambda lines: lines[0].update(case=dict.fromkeys(lines[0]["case"], "R/R/R"))),
        ),
        "the cases are",
    ),
    "layout relabelled": (lambda run: edit_config(run, train_tp=2), "make 2 trainer ranks, the timeline says 1"),
    "segments relabelled": (lambda run: edit_config(run, max_tp=4), "the settings make 4 K segments, the contract 1"),
    "temperature relabelled": (
        lambda run: edit_config(run, temperature=0.5),
        "config.temperature is 0.5, the contract says 1.0",
    ),
    "device relabelled": (lambda run: edit_config(run, device="cuda"), "ran on cpu, config.device is 'cuda'"),
    "groups relabelled": (lambda run: edit_config(run, samples_per_prompt=2), "but 1/0/2 begins no group"),
    "length relabelled": (lambda run: edit_config(run, max_response_length=2), "the response of 1/0/1 is longer"),
    "evaluations relabelled": (
        lambda run: edit_config(run, eval_interval=1, eval_data="x", eval_prompts=4),
        "evaluations are due after steps [0, 1, 2]",
    ),
    "replay relabelled": (lambda run: edit_config(run, replay_tokens="x"), "config.replay_tokens and the run"),
    "provider relabelled": (
        lambda run: (
            edit_config(run, linear_logp_provider="a.b"),
            edit_json(
                next((run / "routes").glob("*trainer*")), lambda r: r.update(linear_logp={"provider": "samebits.x"})
            ),
        ),
        "linear_logp.provider is 'samebits.x', declared is 'a.b'",
    ),
    "other weights at the end": (
        lambda run: edit_json(next((run / "routes").glob("*rollout*")), lambda r: r.update(weights=[1, "w1"])),
        "holds weights [1, 'w1'], published last were [2, 'w2']",
    ),
    "tokens trained on": (
        lambda run: edit_lines(run, lambda lines: find(lines, "trained").update(tokens=-3)),
        "trained on -3 tokens",
    ),
    "negative time": (
        lambda run: edit_lines(run, lambda lines: find(lines, "published").update(seconds=-1.0)),
        "negative time",
    ),
    "impossible accuracy": (
        lambda run: edit_lines(run, lambda lines: find(lines, "evaluated").update(accuracy=7.0)),
        "accuracy 7.0 of 4 samples",
    ),
    "metrics missing": (
        lambda run: edit_lines(run, lambda lines: find(lines, "measured").update(metrics={})),
        "the timeline claims None",
    ),
    "numbers without a sum": (
        lambda run: edit_lines(run, lambda lines: [x.update(reward=1.7e308) for x in lines if x["kind"] == "sampled"]),
        "reward or advantage",
    ),
    "a number beyond float64": (
        lambda run: edit_lines(run, lambda lines: find(lines, "sampled").update(reward=10**400)),
        "sampled.reward: want",
    ),
    "more ranks than anybody has": (
        lambda run: (
            edit_config(run, train_dp=10**12),
            edit_lines(run, lambda lines: lines[0].update(trainer_ranks=10**12)),
        ),
        "processes are said to have run",
    ),
    "prompt of one sample": (
        lambda run: (flip(run / STEP, tensor_at(run / STEP, "token_ids")), sign_step(run)),
        "the samples of 2/0 have different prompts",
    ),
    "id outside the vocabulary": (
        lambda run: (flip(run / STEP, tensor_at(run / STEP, "token_ids") + 4 * 3 + 1), sign_step(run)),
        "sample 2/0/0: ids from 5 to 266, the contract's vocabulary has 64",
    ),
    "log-probability above 0": (
        lambda run: (
            [flip(run / STEP, tensor_at(run / STEP, f"{side}_logp") + 3, 7) for side in ("rollout", "trainer")],
            sign_step(run),
        ),
        "sample 2/0/0: a log-probability is above 0",
    ),
    "advantage turned around": (
        lambda run: (
            flip(run / STEP, tensor_at(run / STEP, "advantages") + 7, 7),
            sign_step(run),
            edit_lines(run, lambda lines: find(lines, "sampled", -6).update(advantage=-1.5)),
        ),
        "the samples of 2/0 have rewards 0.0 and 1.0 with advantages that order otherwise",
    ),
    "ratio of other numbers": (
        lambda run: edit_lines(run, lambda lines: find(lines, "trained").update(ratio_mean=0.9)),
        "no token differs, but the trainer's ratio_mean is 0.9",
    ),
    "faster training": (
        lambda run: edit_lines(run, lambda lines: find(lines, "timed")["seconds"].update(train=0.1)),
        "train took 0.1 s, a part of it 0.5 s",
    ),
    "accuracy of other samples": (
        lambda run: edit_lines(run, lambda lines: find(lines, "evaluated").update(accuracy=0.6)),
        "accuracy 0.6 is no share of 4 samples",
    ),
    "evaluated at length": (
        lambda run: (
            edit_config(run, eval_interval=2, eval_data="x", eval_prompts=4, max_response_length=8),
            edit_lines(run, lambda lines: find(lines, "evaluated").update(mean_response_length=9.0)),
        ),
        "evaluated responses had another length",
    ),
    "cut off before its end": (
        lambda run: (
            edit_config(run, max_response_length=4),
            edit_lines(run, lambda lines: find(lines, "sampled", -2).update(finish_reason="length")),
        ),
        "2/1/1 is said to end there and does not",
    ),
    "KL relabelled": (lambda run: edit_config(run, kl_coef=0.5), "config.kl_coef is 0.5, the loss of step 1"),
    "another reference read": (
        lambda run: edit_inputs(run, model="a", reference="b", held_out=None),
        "config names no reference model, and another than the model was read",
    ),
    "evaluation relabelled": (
        lambda run: edit_inputs(run, model="a", reference="a", held_out="c"),
        "config.eval_data is None, other inputs were read",
    ),
    "another reward": (lambda run: edit_config(run, reward="my.score"), "config.reward is 'my.score', None was used"),
    "model that was said to be kept": (lambda run: edit_config(run, save_model=True), "saved is None"),
    "model that nobody kept": (lambda run: (run / "model").mkdir(), "model lies here, but the run saved no model"),
    "kept model of other weights": (lambda run: keep_model(run, digest="w1"), "saved model is not version 2"),
    "kept model without files": (lambda run: keep_model(run, files={}), "saved names no files"),
    "kept model without a file": (
        lambda run: (keep_model(run), (run / "model/config.json").unlink()),
        "model/config.json is missing, or not the file that was saved",
    ),
    "kept model with a stranger": (
        lambda run: (keep_model(run), (run / "model/modeling.py").write_text("")),
        "model/modeling.py was not saved by the run",
    ),
    "kept model that is a file": (
        lambda run: (keep_model(run), shutil.rmtree(run / "model"), (run / "model").write_text("")),
        "Not a directory",
    ),
    "kept model with another file": (
        lambda run: (keep_model(run), (run / "model/config.json").write_text("{ }")),
        "model/config.json is missing, or not the file that was saved",
    ),
    "packages relabelled": (
        lambda run: edit_route(run, "trainer", lambda r: r.update(versions={"samebits": "1"})),
        "ran samebits 1, the manifest says 0",
    ),
    "patch that was not there": (
        lambda run: edit_route(run, "rollout", lambda r: r.update(patches=[{"in_place": False}])),
        "a patch that it lists was not in place",
    ),
    "two builds of the kernels": (
        lambda run: edit_route(run, "trainer", lambda r: r.update(kernels="cd" * 32)),
        "computed with other kernels than rollout-0-0",
    ),
    "scored by native code": (
        lambda run: edit_route(
            run,
            "trainer",
            lambda r: (
                r["modules"]["logp.first"].update(boundary="logprob"),
                r.update(
                    counters={"linear": 12, "linear_logp": 4}, linear_logp={"calls": {"provider": 0, "native": 4}}
                ),
            ),
        ),
        "scored 4 times by native code and 0 times by its provider",
    ),
    "sidecar of no step": (
        lambda run: (run / "steps/step_00009.safetensors").write_bytes(b""),
        "steps/step_00009.safetensors belongs to no step",
    ),
    "traces taken away": (lambda run: edit_config(run, trace_tokens=3), "trace/step_00001.safetensors is missing"),
    "route missing": (
        lambda run: next((run / "routes").glob("*rollout*")).unlink(),
        "no route record of rollout-0-0",
    ),
    "route by another code": (
        lambda run: edit_json(
            next((run / "routes").glob("*trainer*")),
            lambda r: r["modules"]["ffn.first"].update(route="P"),
        ),
        "ffn.first went route P",
    ),
    "route that states another contract": (
        lambda run: edit_json(
            next((run / "routes").glob("*trainer*")), lambda r: r["contract_content"].update(segments=2)
        ),
        "the contract's content that it states has not the digest",
    ),
    "route of another contract": (
        lambda run: edit_json(next((run / "routes").glob("*trainer*")), lambda r: r.update(contract="x")),
        "served contract x",
    ),
    "route never called": (
        lambda run: edit_json(
            next((run / "routes").glob("*trainer*")), lambda r: r["modules"]["ffn.first"].update(calls=0)
        ),
        "no call of any module of ffn",
    ),
    "kernels never called": (
        lambda run: edit_json(next((run / "routes").glob("*rollout*")), lambda r: r.update(counters={"linear": 3})),
        "linear is said to have run 4 times by samebits, its kernels counted 3",
    ),
    "no counters": (
        lambda run: edit_json(next((run / "routes").glob("*rollout*")), lambda r: r.pop("counters")),
        "its kernel counters are missing",
    ),
    "native code under a strict label": (
        lambda run: edit_json(
            next((run / "routes").glob("*rollout*")),
            lambda r: r["modules"]["ffn.first"].update(implementation="vllm.layers.SiluAndMul"),
        ),
        "ffn.first is declared R, but vllm.layers.SiluAndMul computed it",
    ),
    "kernels without a digest": (
        lambda run: edit_json(next((run / "routes").glob("*rollout*")), lambda r: r.update(kernels="x")),
        "the digest of the kernels' binary is 'x'",
    ),
    "compiled where eager was declared": (
        lambda run: edit_json(
            next((run / "routes").glob("*rollout*")),
            lambda r: r.update(mode="compiled", graphs=[{"digest": "0" * 64, "samebits": []}]),
        ),
        "rollout-0-0: ran compiled, declared is eager",
    ),
    "compiled without a graph": (
        lambda run: edit_json(next((run / "routes").glob("*rollout*")), lambda r: r.update(mode="compiled")),
        "shows no graph that was compiled",
    ),
    "route of a stranger": (
        lambda run: edit_json(next((run / "routes").glob("*rollout*")), lambda r: r.update(engine=1)),
        "no such process in this run",
    ),
    "route without a name": (
        lambda run: edit_json(next((run / "routes").glob("*rollout*")), lambda r: r.update(rank=True)),
        "names no process",
    ),
    "route of many roles": (lambda run: edit_route(run, "rollout", lambda r: r.update(role=["x"])), "names no process"),
    "route of many boundaries": (
        lambda run: edit_route(run, "trainer", lambda r: r["modules"]["ffn.first"].update(boundary=["x"])),
        "no modules",
    ),
}


@pytest.mark.parametrize("name", SIGNED)
def test_tampering_is_caught_even_when_signed_anew(run: Path, name: str) -> None:
    tamper, message = SIGNED[name]
    tamper(run)
    reseal(run)
    found = verify(run)
    assert found.verdict is Verdict.CANNOT_TELL
    assert message in found.problems[0]


def test_every_single_bit_of_a_log_probability_counts(run: Path) -> None:
    """Flipping any of the 32 bits of one trainer value, recorded and signed anew, does not go unseen."""
    offset = tensor_at(run / STEP, "trainer_logp")
    for bit in range(32):
        flip(run / STEP, offset + bit // 8, bit % 8)
        digest = hashlib.sha256((run / STEP).read_bytes()).hexdigest()
        edit_lines(run, lambda lines, digest=digest: find(lines, "compared").update(sidecar_sha256=digest))
        reseal(run)
        assert "mismatch_count is 1, the timeline claims 0" in verify(run).problems[0]
        flip(run / STEP, offset + bit // 8, bit % 8)


def test_verifying_needs_python_and_nothing_else(run: Path) -> None:
    """-S leaves site-packages out, so that any import of something installed would fail."""
    source = Path(samebits.__file__).parent.parent
    command = [sys.executable, "-S", "-m", "samebits.evidence.verify", str(run)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("verdict: same")


def test_a_directory_with_a_run_is_refused(run: Path) -> None:
    with pytest.raises(FileExistsError, match="already holds a run"):
        RunDirectory.create(run)
