"""The benchmark measures what it says, and its records say where they come from."""

from __future__ import annotations

import json
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samebits.bench.cpu import Work, measure
from samebits.bench.measure import Record, interleaved
from samebits.bench.plot import ratio_plot
from samebits.bench.record import provenance
from samebits.cli.main import app

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def test_pairs_take_turns_and_the_ratio_is_peer_over_ours() -> None:
    order: list[str] = []

    def ours() -> None:
        order.append("ours")
        time.sleep(0.01)

    def theirs() -> None:
        order.append("theirs")
        time.sleep(0.03)

    record = measure(Work("sleep", "", "a longer one", ours, theirs, goal=1.0), seconds=0.0)
    assert order == ["ours", "theirs"] * 6  # one warm-up, then five
    assert record.repeats == 5
    assert 1.5 < record.ratio < 4
    assert not record.missed


def test_a_missed_goal_says_why() -> None:
    work = Work("sleep", "", "none", lambda: time.sleep(0.003), lambda: None, goal=1.0, obstacle="it sleeps")
    record = measure(work, seconds=0.0)
    assert record.missed
    assert record.reason == "it sleeps"
    assert record.as_data()["missed"] is True


def test_medians_ignore_one_slow_call() -> None:
    pauses = iter([0, 0.001, 0.001, 0.2, 0.001, 0.001])
    ours, _, _ = interleaved(lambda: time.sleep(next(pauses)), lambda: None, seconds=0.0)
    assert ours < 0.05


def test_provenance_names_machine_versions_and_commit() -> None:
    about = provenance()
    assert set(about) == {"machine", "versions", "python", "commit"}
    assert about["versions"]["torch"].startswith("2.")  # type: ignore[index]


def test_the_plot_is_valid_and_marks_what_was_missed() -> None:
    records = [
        Record("a <b>", "1", "torch", 1.0, 2.0, 2.0, 5, goal=1.0).as_data(),
        Record("c", "2", "torch", 1.0, 0.5, 0.5, 5, goal=0.7).as_data(),
        Record("d", "3", "torch", 1.0, 99.0, 99.0, 5).as_data(),
    ]
    root = ET.fromstring(ratio_plot("title", records))
    bars = [rect.get("class") for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert bars == ["page", "met", "miss", "free"]


def test_the_command_writes_records_and_a_plot(tmp_path: Path) -> None:
    out = tmp_path / "new" / "v1.2"
    arguments = ["bench", "cpu", "--filter", "RMSNorm", "--seconds", "0", "--threads", "1", "--out", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    record = json.loads((out.parent / "v1.2.json").read_text())
    assert [r["what"] for r in record["records"]] == ["RMSNorm", "add and RMSNorm"]
    assert all(r["ratio"] == pytest.approx(r["peer_s"] / r["samebits_s"]) for r in record["records"])
    assert (out.parent / "v1.2.svg").exists()


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("/proc/nowhere/x", "No such file or directory: /proc/nowhere\n"),
        (".", "--out . is a folder; give the name of its"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_clear_error(place: str, error: str) -> None:
    done = CliRunner().invoke(app, ["bench", "cpu", "--filter", "rotary", "--out", place])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {error}")


def test_a_filter_that_matches_nothing_is_an_error() -> None:
    done = CliRunner().invoke(app, ["bench", "cpu", "--filter", "no such operator", "--seconds", "0"])
    assert done.exit_code == 2
    assert "no such operator" in done.output
