"""The main job in its cases: what comes out, that it verifies, and that it comes out again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samebits.evidence.verdict import Verdict
from samebits.evidence.verify import verify
from samebits.timeline.events import Evaluated, Published
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


def test_strict_on_both_sides_gives_the_same_bits_twice(start: Callable) -> None:
    runs = []
    for name in ("first", "second"):
        job = start(name, case="R/R", num_rollout=3, eval_interval=3, eval_prompts=8)
        assert job.wait() == Verdict.SAME.exit_code, job.output + job.logs()
        assert "all" in job.output
        runs.append(job.path)
    totals = summary(runs[0])
    assert (totals["mismatch_count"], totals["max_abs_diff"], totals["steps"]) == (0, 0.0, 3)
    assert totals["compared_tokens"] > 100
    assert (runs[0] / "report.html").is_file()
    for step in (1, 2, 3):
        name = f"steps/step_{step:05d}.safetensors"
        assert (runs[0] / name).read_bytes() == (runs[1] / name).read_bytes()
    first, second = (read(run / "timeline.jsonl").events for run in runs)
    assert weights(first) == weights(second)
    assert len(set(weights(first))) == 4
    accuracies = [[e.accuracy for e in events if isinstance(e, Evaluated)] for events in (first, second)]
    assert accuracies[0] == accuracies[1]


def weights(events: tuple) -> list[tuple[int, str]]:
    return [(event.version, event.digest) for event in events if isinstance(event, Published)]


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


def test_one_native_module_is_recorded_as_such(start: Callable) -> None:
    job = start("run", ffn_case="P/R")
    assert job.wait() in (Verdict.SAME.exit_code, Verdict.DIFFERENT.exit_code), job.output + job.logs()
    totals = summary(job.path)
    assert totals["modules"] == {"attention": "R/R", "ffn": "P/R", "logp": "R/R"}
    assert totals["case"] == "attention=R/R ffn=P/R logp=R/R"


def test_draws_from_a_nucleus_give_the_same_bits_over_it(start: Callable) -> None:
    job = start("run", top_p=0.9, top_k=20, train_tp=2)
    assert job.wait() == Verdict.SAME.exit_code, job.output + job.logs()
    totals = summary(job.path)
    assert (totals["mismatch_count"], totals["steps"]) == (0, 2)
    found = verify(job.path)
    assert found.sampling.startswith(f"top-k 20, top-p 0.9; all {totals['compared_tokens']} tokens lie in their")
    assert f"Sampling: {found.sampling}" in (job.path / "report.html").read_text()


def test_tensor_parallel_on_both_sides_gives_the_same_bits(start: Callable) -> None:
    job = start("run", train_tp=2, rollout_tp=2)
    assert job.wait() == Verdict.SAME.exit_code, job.output + job.logs()
    assert summary(job.path)["mismatch_count"] == 0
    assert len(list((job.path / "routes").iterdir())) == 4
