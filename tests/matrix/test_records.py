"""The page about layouts shows the committed records; the benchmark of layouts runs."""

from __future__ import annotations

import io
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from samebits.cli.matrix import table
from samebits.matrix.plan import read_matrix

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    made: Callable[[str], str] = runpy.run_path(str(ROOT / "benchmarks/topology.py"))["page"]
    return made


def test_the_tables_of_the_page_are_made_from_the_records(page: Callable[[str], str]) -> None:
    text = (ROOT / "docs/topology.md").read_text()
    assert page(text) == text, "run: python benchmarks/topology.py docs"


def test_a_figure_that_was_changed_by_hand_is_noticed(page: Callable[[str], str]) -> None:
    text = (ROOT / "docs/topology.md").read_text()
    assert page(text.replace("**same**", "**splendid**")) == text


def test_what_is_on_record_is_the_same_bits_everywhere() -> None:
    record = json.loads((ROOT / "benchmarks/results/topology.json").read_text())
    assert record["verdict"] == "same"
    assert len(record["pairs"]) >= 16
    assert all(pair["mismatch_count"] == 0 and pair["compared_tokens"] > 0 for pair in record["pairs"])
    card = json.loads((ROOT / "benchmarks/results/topology_gpu.json").read_text())
    assert card["verdict"] == "same"
    wanted = read_matrix(ROOT / "recipes/topology-gpu.toml", {}).pairs
    assert [(pair["trainer"], pair["rollout"]) for pair in card["pairs"]] == list(wanted)
    assert {layout["processes"] for layout in card["layouts"].values()} == {1, 2, 4, 8}
    assert all(pair["mismatch_count"] == 0 and pair["weights_as_reference"] for pair in card["pairs"])
    reference = json.loads((ROOT / "benchmarks/results/topology_reference.json").read_text())
    assert (reference["verdict"], reference["mismatch_count"]) == ("same", 0)
    assert len(reference["processes"]) == 16


def test_the_benchmark_of_layouts_runs(tmp_path: Path) -> None:
    out = tmp_path / "trial.json"
    words = ["--sizes", "4", "--ranks", "2", "--calls", "10", "--layouts", "--out", str(out)]
    subprocess.run([sys.executable, ROOT / "benchmarks/layouts.py", *words], check=True, capture_output=True)
    record = json.loads(out.read_text())
    assert {row["operation"] for row in record["collectives"]} == {"all-reduce", "reduce-scatter", "all-gather"}
    assert all(row[arm] > 0 for row in record["collectives"] for arm in record["arms"])


def test_an_error_s_text_is_no_markup() -> None:
    problem = "RuntimeError: [/gloo/pair.cc:547] Connection closed by peer"
    pair = {"trainer": "tp2", "rollout": "tp1", "verdict": "cannot tell", "problem": problem, "weights": ""}
    stream = io.StringIO()
    Console(file=stream, width=200).print(table({"pairs": [pair]}))
    assert problem in stream.getvalue()
