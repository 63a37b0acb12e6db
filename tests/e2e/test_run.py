"""The main job in its cases: what comes out, that it verifies, and that it comes out again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samebits.bits import tree_digests
from samebits.evidence.sidecar import StepSample, read_step, sidecar_name
from samebits.evidence.verdict import Verdict
from samebits.evidence.verify import verify
from samebits.rl.chat import ChatTokenizer
from samebits.rl.config import RunConfig
from samebits.rl.inputs import resolve_inputs
from samebits.rl.publication import read_weights, version_of
from samebits.timeline.events import Evaluated, Published, Sampled
from samebits.timeline.ledger import read


def summary(run: Path) -> dict[str, Any]:
    """The run's summary, after checking that the records alone give it and that its floats are finite."""
    found = verify(run)
    assert found.problems == ()
    totals = json.loads((run / "summary.json").read_text())
    assert totals == found.totals
    assert totals["verdict"] == found.verdict.value
    assert all(math.isfinite(value) for value in totals.values() if isinstance(value, float))
    return totals


STRICT = {"case": "R/R", "num_rollout": 3, "eval_interval": 3, "eval_prompts": 8}


def strict_run(start: Callable, name: str, **flags: object) -> Path:
    job = start(name, **STRICT, **flags)
    assert job.wait() == Verdict.SAME.exit_code, job.output + job.logs()
    assert "all" in job.output
    return job.path


@pytest.fixture(scope="module")
def strict(start_once: Callable) -> Path:
    return strict_run(start_once, "strict")


def test_strict_on_both_sides_gives_the_same_bits_twice(start: Callable, strict: Path) -> None:
    again = strict_run(start, "again", save_model=True)
    totals = summary(strict)
    assert (totals["mismatch_count"], totals["max_abs_diff"], totals["steps"]) == (0, 0.0, 3)
    assert totals["compared_tokens"] > 100
    assert (strict / "report.html").is_file()
    for step in (1, 2, 3):
        assert (strict / sidecar_name(step)).read_bytes() == (again / sidecar_name(step)).read_bytes()
    first, second = (read(run / "timeline.jsonl").events for run in (strict, again))
    assert weights(first) == weights(second)
    assert len(set(weights(first))) == 4
    assert_same_model(again / "model", weights(second)[-1][1])
    accuracies = [[e.accuracy for e in events if isinstance(e, Evaluated)] for events in (first, second)]
    assert accuracies[0] == accuracies[1]


def assert_same_model(model: Path, digest: str) -> None:
    """A directory that a run can start from, with the weights of this digest."""
    assert version_of(0, tree_digests(read_weights(model))).digest == digest
    started_from = resolve_inputs(RunConfig()).model
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.suffix != ".safetensors"}
    assert files == {path.name: path.read_bytes() for path in started_from.iterdir() if path.name in files}
    assert resolve_inputs(RunConfig(model=str(model))).model == model
    assert (model / "model.safetensors").stat().st_mode == (model / "config.json").stat().st_mode
    assert set(files) == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def weights(events: tuple) -> list[tuple[int, str]]:
    return [(event.version, event.digest) for event in events if isinstance(event, Published)]


def facts(sample: StepSample) -> tuple[tuple[int, ...], ...]:
    return tuple(sample.token_ids), tuple(sample.rollout_bits), tuple(sample.trainer_bits)


def test_two_engines_share_the_prompts_and_give_the_bits_of_one(start: Callable, strict: Path) -> None:
    """However little each computes at once. All get every publication, and the records name each."""
    two = strict_run(start, "two", rollout_engines=2, max_num_seqs=3, max_num_batched_tokens=24)
    for step in (1, 2, 3):
        left, right = (read_step(run / sidecar_name(step)) for run in (strict, two))
        assert [facts(sample) for sample in left] == [facts(sample) for sample in right]
    events = read(two / "timeline.jsonl").events
    assert [event.engines for event in events if isinstance(event, Published)] == [2, 2, 2, 2]
    sampled = [event for event in events if isinstance(event, Sampled)]
    assert {event.engine for event in sampled} == {0, 1}
    served: dict[str, set[int]] = {}
    for event in sampled:
        served.setdefault(event.key.rsplit("/", 1)[0], set()).add(event.engine)
    assert all(len(engines) == 1 for engines in served.values()), "a prompt was torn between engines"
    routes = [json.loads(path.read_text()) for path in sorted((two / "routes").iterdir())]
    assert sorted(r["engine"] for r in routes if r["role"] == "rollout") == [0, 1]
    assert len({r["process"] for r in routes}) == len(routes) == 3

    record = next(p for p in (two / "routes").iterdir() if json.loads(p.read_text())["engine"] == 1)
    record.unlink()
    assert verify(two).verdict is Verdict.CANNOT_TELL, "an engine without its record was not missed"


@pytest.mark.parametrize("case", ["P/P", "R/P", "P/R"])
def test_native_code_on_a_side_shows_the_mismatch(start: Callable, case: str) -> None:
    job = start("run", case=case)
    assert job.wait() == Verdict.DIFFERENT.exit_code, job.output + job.logs()
    assert f"case {case}: different" in job.output
    totals = summary(job.path)
    assert totals["steps_with_mismatch"] == totals["steps"] == 2
    assert totals["mismatch_count"] > 0
    assert totals["max_abs_diff"] > 0
    assert totals["worst"] is not None


def test_draws_from_a_nucleus_give_the_same_bits_over_it(start: Callable) -> None:
    job = start("run", top_p=0.9, top_k=20, train_tp=2, reward="operator.gt")
    assert job.wait() == Verdict.SAME.exit_code, job.output + job.logs()
    totals = summary(job.path)
    assert (totals["mismatch_count"], totals["steps"]) == (0, 2)
    found = verify(job.path)
    assert found.sampling.startswith(f"top-k 20, top-p 0.9; all {totals['compared_tokens']} tokens lie in their")
    decode = ChatTokenizer(resolve_inputs(RunConfig()).model).decode
    labels = [json.loads(line)["label"] for line in resolve_inputs(RunConfig()).prompts.read_text().splitlines()]
    for sample in read_step(job.path / sidecar_name(1)):
        assert sample.reward == (decode(sample.token_ids) > labels[int(sample.key.split("/")[1])])
    assert f"Sampling: {found.sampling}" in (job.path / "report.html").read_text()


def test_tensor_parallel_on_both_sides_gives_the_same_bits(start: Callable) -> None:
    job = start("run", train_tp=2, rollout_tp=2)
    assert job.wait() == Verdict.SAME.exit_code, job.output + job.logs()
    assert summary(job.path)["mismatch_count"] == 0
    assert len(list((job.path / "routes").iterdir())) == 4
