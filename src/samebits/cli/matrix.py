"""`samebits run --matrix`: every pair of layouts of a file, as a table and as an exit code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from samebits.evidence.verdict import Verdict
from samebits.matrix import Matrix, read_matrix, run_matrix
from samebits.matrix.record import RECORD, TABLE, columns, rows
from samebits.report.terminal import print_whole


def matrix_command(file: Path, folder: Path | None, flags: Mapping[str, Any]) -> int:
    """Runs the matrix and returns the exit code. Raises ValueError for what can't work, before anything starts."""
    from samebits.cli.wiring import parts

    matrix = read_matrix(file, flags)
    folder = folder or Path("runs") / f"matrix-{file.stem}"
    record = run_matrix(matrix, folder, parts(), lambda line: typer.echo(line, err=True))
    print_whole(table(record), Console(highlight=False))
    typer.echo(conclusion(matrix, record))
    typer.echo(f"records: {folder / RECORD}, {folder / TABLE}")
    return Verdict(record["verdict"]).exit_code


def table(record: Mapping[str, Any]) -> Table:
    """The pairs of a matrix, for a terminal."""
    found = Table(box=SIMPLE)
    for head in columns(record):
        found.add_column(head)
    for cells in rows(record):
        found.add_row(*map(escape, cells))  # an error's text may look like markup
    return found


def conclusion(matrix: Matrix, record: Mapping[str, Any]) -> str:
    """The verdict over all pairs in plain words."""
    same = sum(pair["verdict"] == Verdict.SAME.value for pair in record["pairs"])
    tokens = sum(pair.get("compared_tokens", 0) for pair in record["pairs"])
    trainers, rollouts = (len(matrix.layouts[side]) for side in ("trainer", "rollout"))
    return (
        f"{record['verdict']}: {same} of {len(record['pairs'])} pairs ({trainers} trainer layouts, {rollouts} rollout "
        f"layouts) have the same bits on both sides, over {tokens:,} comparisons"
    )
