"""Comparisons, ablations and the terminal form show what the records hold."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from samebits.ablate.table import ABLATION, collect
from samebits.evidence.speed import equal_length, speed
from samebits.report import write_report
from samebits.report.ablation import write_ablation_report
from samebits.report.compare import load, write_comparison
from samebits.report.series import trailing_median
from samebits.report.terminal import print_report, sparkline
from samebits.report.topology import topology
from samebits.report.worst import worst_tokens
from samebits.testing.runs import CONTRACT, write_run
from samebits.timeline.events import Timed


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    write_run(tmp_path / "strict", steps=4)
    write_run(tmp_path / "native", steps=4, case="P/P", flips={(2, 1), (2, 4)})
    return [tmp_path / "strict", tmp_path / "native"]


@pytest.fixture
def ablation(tmp_path: Path) -> Path:
    folder = tmp_path / "ablate"
    for view in ("free", "equal"):
        write_run(folder / view / "M000", case="P/P", flips={(1, 2)})
        write_run(folder / view / "M111")
    plan = {"arms": ["M000", "M111"], "views": ["free", "equal"], "tokens_of": "M111", "contract": CONTRACT.digest()}
    plan |= {"packages": {"samebits": "0"}, "inputs": {}, "config": {}}
    (folder / ABLATION).write_text(json.dumps(collect(folder, plan, {})))
    return folder


def test_a_comparison_starts_with_the_verdicts(runs: list[Path], tmp_path: Path) -> None:
    text = write_comparison(runs, tmp_path / "both.html").read_text()
    assert text.index("0 of 72 log-probabilities differ") < text.index("2 of 72 log-probabilities differ")
    assert text.index("2 of 72") < text.index("Side by side") < text.index("mismatch_count per step")
    assert text.count('class="line series1"') >= 10
    assert "Settings that differ" in text
    assert "http" not in text


def test_an_ablation_has_a_page(ablation: Path) -> None:
    text = write_ablation_report(ablation).read_text()
    assert text.index("Every arm proves its route") < text.index("Free-running") < text.index("Equal work")
    assert text.count("mean abs dlogp per step") == text.count("mismatch_count per step") == 2
    # a row of the table and two legends, in each view
    assert text.count("M000") == 6


def test_an_ablation_that_broke_off_shows_the_arms_that_ended(ablation: Path) -> None:
    (ablation / "equal/M000/seal.json").unlink()
    text = write_ablation_report(ablation).read_text()
    assert "cannot tell" in text
    assert text.count("series1") - text.count(".series1") == 2


def test_a_path_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        write_comparison([tmp_path, tmp_path], tmp_path / "x.html")


def terminal(paths: list[Path], width: int) -> str:
    stream = io.StringIO()
    print_report(paths, Console(file=stream, width=width))
    return stream.getvalue()


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    paths = [tmp_path / "1" / "run", tmp_path / "2" / "run", tmp_path / "other"]
    for path in paths:
        write_run(path)
    assert [run.name for run in load(paths)] == [str(paths[0]), str(paths[1]), "other"]


def test_a_name_is_no_markup(tmp_path: Path) -> None:
    write_run(tmp_path / "lr[red]")
    assert terminal([tmp_path / "lr[red]", tmp_path / "lr[red]"], 200).count("lr[red]") == 2


@pytest.mark.parametrize("width", [60, 200])
def test_the_terminal_form(runs: list[Path], ablation: Path, width: int) -> None:
    text = terminal(runs, width)
    assert text.startswith("same  strict  case R/R")
    assert "different  native  case P/P" in text
    assert "▁█▁▁" in text
    assert "tokens/s" in text
    table = terminal([ablation], width)
    assert table.startswith("same  ablation ablate")
    assert "…" not in table


def test_worst_tokens_are_ordered_and_shown_with_what_stood_before(runs: list[Path]) -> None:
    worst = worst_tokens(runs[1], 4, {})
    assert [one.where for one in worst] == ["2/0/1@0", "2/1/1@0"]
    assert (worst[0].before, worst[0].token) == ("5 6 7", "10")
    assert worst[0].difference >= worst[1].difference > 0
    page = write_report(runs[1]).read_text()
    assert "Worst tokens" in page
    assert "<mark>10</mark>" in page
    assert "Worst tokens" not in write_report(runs[0]).read_text()


def test_the_topology_shows_every_process() -> None:
    picture = topology({"train_tp": 2, "train_cp": 2, "rollout_engines": 2, "rollout_tp": 2})
    assert picture.count('class="box"') == 8
    assert "TP2 CP2" in picture
    assert topology({"train_tp": 99}) == ""
    assert topology({"train_tp": "<script>"}).count('class="box"') == 2


def test_a_median_trails() -> None:
    points = [(at, float(value)) for at, value in enumerate([5, 1, 9, 1, 1])]
    assert [value for _, value in trailing_median(points, 3)] == [5, 3, 5, 1, 1]


def timed(tokens: list[int]) -> list[Timed]:
    return [Timed(step=at, generated_tokens=n, seconds={"generate": 2.0}) for at, n in enumerate(tokens, start=1)]


def test_the_equal_length_view_takes_steps_of_about_the_same_length() -> None:
    left, right = timed([1, 1, 100, 100, 100]), timed([1, 1, 105, 300, 95])
    views = equal_length([left, right])
    assert views is not None
    assert [(one.steps, one.tokens_per_second) for one in views] == [(2, 50.0), (2, 50.0)]
    assert equal_length([left, timed([1, 1, 300])]) is None
    assert speed(right).tokens_per_second == 500 / 6


def test_a_sparkline_keeps_the_peaks() -> None:
    assert sparkline([0.0, 7.0, 0.0], 10) == "▁█▁"
    assert sparkline([0.0] * 99 + [1.0], 10).endswith("█")
    assert sparkline([3.0, 3.0], 10) == "▁▁"
