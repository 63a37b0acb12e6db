"""The report for people on a server: the same numbers as text, on a terminal of any width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from samebits.ablate.check import is_ablation, verify_ablation
from samebits.ablate.table import HEAD, TITLES, cells, notes
from samebits.evidence.verdict import Verdict
from samebits.report.charts import number
from samebits.report.compare import HEADS, Compared, load, speed_note, summary_row

_BARS = "▁▂▃▄▅▆▇█"
COLOURS = {Verdict.SAME: "green", Verdict.DIFFERENT: "red", Verdict.CANNOT_TELL: "yellow"}
_LINES = (
    "mismatch_count",
    "max_abs_diff",
    "kl_k3",
    "reward",
    "kl",
    "grad_norm",
    "loss",
    "tokens_per_second",
    "seconds",
)


def print_report(paths: Sequence[Path], console: Console) -> None:
    """One run, several, or an ablation. Raises ValueError for a path without records."""
    if len(paths) == 1 and is_ablation(paths[0]):
        _ablation(paths[0], console)
        return
    runs = load(paths)
    for run in runs:
        _print_run(run, console)
    if len(runs) > 1:
        rows = [[cell.replace("\u2009", "") for cell in summary_row(run)] for run in runs]
        for at, head in enumerate(HEADS[1:], start=1):
            console.print(f"{head:<24}" + "  ".join(row[at] for row in rows), markup=False, soft_wrap=True)
    console.print(speed_note(runs), markup=False, soft_wrap=True)


def _print_run(run: Compared, console: Console) -> None:
    colour = COLOURS[run.found.verdict]
    case = run.found.totals.get("case", "?")
    console.print(f"[{colour} bold]{run.found.verdict.value}[/]  {escape(run.name)}  case {escape(str(case))}")
    for problem in run.found.problems:
        console.print(f"  {problem}", markup=False, soft_wrap=True)
    width = max(10, min(60, console.width - 44))
    for name in _LINES:
        points = run.series.points(name)
        if points:
            values = [value for _, value in points]
            ends = f"last {number(values[-1])}  max {number(max(values))}"
            console.print(f"  {name:<18}{sparkline(values, width)}  {ends}", highlight=False)
    console.print()


def sparkline(values: Sequence[float], width: int) -> str:
    """One character per step, or per run of steps where there are more than `width`: then each run's largest value."""
    size = -(-len(values) // width)
    shown = [max(values[at : at + size]) for at in range(0, len(values), size)]
    low, high = min(shown), max(shown)
    if high == low:
        return _BARS[0] * len(shown)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in shown)


def _ablation(folder: Path, console: Console) -> None:
    found = verify_ablation(folder)
    console.print(f"[{COLOURS[found.verdict]} bold]{found.verdict.value}[/]  ablation {escape(folder.resolve().name)}")
    for problem in found.problems:
        console.print(f"  {problem}", markup=False, soft_wrap=True)
    print_views(found.table.get("views", {}), console)


def print_whole(table: Table, console: Console) -> None:
    """A table of any width: a cut-off name or number is worse than a line that the terminal breaks."""
    wide = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    console.width = max(console.width, wide)
    console.print(table)


def print_views(views: Mapping[str, Sequence[Mapping[str, Any]]], console: Console) -> None:
    """The tables of an ablation."""
    for view, rows in views.items():
        table = Table(*HEAD, title=TITLES[view], box=SIMPLE, pad_edge=False, title_justify="left")
        for column in table.columns[5:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*cells(row))
        print_whole(table, console)
        for note in notes(rows):
            console.print(note, markup=False, soft_wrap=True)
