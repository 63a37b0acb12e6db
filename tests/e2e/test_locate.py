"""From a recorded run to the boundary that differs, by the commands that a user types."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samebits.evidence.verdict import Verdict
from samebits.evidence.verify import verify


def locate(run: Path, *words: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "samebits.cli.main", "locate", str(run), "--json", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.stdout, ran.stderr
    return ran.returncode, json.loads(ran.stdout)


def test_a_run_with_native_code_is_located_at_a_later_step(start: Callable) -> None:
    """Step 2 needs the first training step again; the run's own trace says the same."""
    job = start("run", ffn_case="R/P", trace_tokens=4)
    assert job.wait() == Verdict.DIFFERENT.exit_code, job.output + job.logs()
    assert verify(job.path).problems == ()
    totals = json.loads((job.path / "summary.json").read_text())
    assert totals["modules"] == {"attention": "R/R", "ffn": "R/P", "logp": "R/R"}
    assert totals["case"] == "attention=R/R ffn=R/P logp=R/R"
    code, found = locate(job.path, "--sample", sample_of_step(job.path, 2))
    assert (code, found["verdict"], found["kind"]) == (1, "different", "operator"), found
    assert (found["where"]["site"], found["where"]["layer"]) == ("MLP norm", 0)
    assert (found["trainer"]["route"], found["rollout"]["route"]) == ("R", "P")
    assert (found["trainer"]["gives_the_contract"], found["rollout"]["gives_the_contract"]) == (True, False)
    assert found["replayed"]["recorded"] == found["replayed"]["trainer"] > 0
    assert "first differs at MLP norm of layer 0" in found["in_the_run"]
    assert (job.path / "locate/test_repro.py").is_file()
    assert verify(job.path).problems == ()


def test_a_strict_run_agrees_and_a_changed_model_cannot_be_told(start: Callable) -> None:
    job = start("run", trace_tokens=4)
    assert job.wait() == Verdict.SAME.exit_code, job.output + job.logs()
    code, found = locate(job.path)
    assert (code, found["verdict"]) == (0, "same"), found
    assert "agreed at" in found["in_the_run"]
    assert found["replayed"]["rollout"] == found["replayed"]["trainer"] == found["replayed"]["recorded"] > 0
    manifest = json.loads((job.path / "manifest.json").read_text())
    manifest["inputs"]["model"]["files"]["model.safetensors"] = "0" * 64
    (job.path / "manifest.json").write_text(json.dumps(manifest))
    code, found = locate(job.path)
    assert (code, found["verdict"]) == (2, "cannot tell")
    assert "changed since the run" in found["summary"]


def sample_of_step(run: Path, step: int) -> str:
    """The name of a step's first sample."""
    lines = (json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines())
    line = next(line for line in lines if line["kind"] == "sampled" and line["step"] == step)
    return f"{step}/{line['prompt']}/{line['sample']}"
