"""`samebits contract`: the boundaries as a table, one of them in full with its drawing, or all as pages."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from samebits.contract import BEHAVIOURS, Boundary
from samebits.contract.boundaries import BOUNDARIES
from samebits.contract.drawing import drawing
from samebits.contract.pages import pages


def show_command(boundary: str | None, as_json: bool) -> int:
    """Prints and returns the exit code: 2 for a boundary that does not exist."""
    chosen = [one for one in BOUNDARIES if boundary in (None, one.name, one.id)]
    if not chosen:
        names = [one.name for one in BOUNDARIES]
        close = difflib.get_close_matches(str(boundary), names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
        typer.echo(f"error: no boundary {boundary!r}; {hint}", err=True)
        return 2
    if as_json:
        found = {one.id: {**one.as_data(), "digest": one.digest(), "drawing": drawing(one)} for one in chosen}
        typer.echo(json.dumps(found, indent=2))
    elif boundary is None:
        _print_table()
        for one in chosen:
            typer.echo(f"{one.id}: merge order\n{_indented(drawing(one))}\n")
    else:
        for one in chosen:
            _print_in_full(one)
    return 0


def docs_command(folder: Path) -> int:
    """Writes the pages into `folder` and returns the exit code: 2 where that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in pages(BOUNDARIES).items():
            (folder / name).write_text(text, encoding="utf-8")
            typer.echo(str(folder / name))
    except OSError as error:
        typer.echo(f"error: cannot write the pages: {error}", err=True)
        return 2
    return 0


def _print_in_full(boundary: Boundary) -> None:
    typer.echo(f"{boundary.id}  {boundary.digest()}")
    for name in BEHAVIOURS:
        typer.echo(f"  {name}: {getattr(boundary, name)}")
    typer.echo(f"  special values: {boundary.specials}")
    for name, value in boundary.constants.items():
        typer.echo(f"  constant {name}: {value}")
    typer.echo(f"\n{_indented(drawing(boundary))}")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def _print_table() -> None:
    table = Table("boundary", "behaviour", "what is promised", box=SIMPLE, pad_edge=False)
    for one in BOUNDARIES:
        table.add_section()
        names = (f"{one.id}", one.digest()[:12], *("" for _ in BEHAVIOURS[2:]))
        for name, behaviour in zip(names, BEHAVIOURS, strict=True):
            table.add_row(name, behaviour, getattr(one, behaviour))
    Console().print(table)
