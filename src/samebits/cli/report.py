"""`samebits report`: one run, one ablation, or several runs side by side; as a page or on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console


def report_command(paths: Sequence[Path], out: Path | None, terminal: bool) -> None:
    """Prints the report, or the path of the page that it wrote: `out`, or one in the run's folder, or comparison.html.

    Raises ValueError for a path without records.
    """
    from samebits.ablate.check import is_ablation
    from samebits.report import write_report
    from samebits.report.ablation import write_ablation_report
    from samebits.report.compare import write_comparison
    from samebits.report.terminal import print_report

    if terminal:
        if out is not None:
            raise ValueError("--terminal prints and writes no page: leave one of --terminal and --out out")
        print_report(paths, Console())
    elif len(paths) > 1:
        typer.echo(str(write_comparison(paths, out or Path("comparison.html"))))
    elif is_ablation(paths[0]):
        typer.echo(str(write_ablation_report(paths[0], out)))
    else:
        typer.echo(str(write_report(paths[0], page=out)))
