"""`samebits contract show`: the boundaries as a table, or one of them in full."""

from __future__ import annotations

import difflib
import json

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from samebits.ops.boundaries import BOUNDARIES

BEHAVIOURS = ("dependency", "partition", "merge", "precision", "rounding", "primitives")


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
        typer.echo(json.dumps({one.id: {**one.as_data(), "digest": one.digest()} for one in chosen}, indent=2))
    elif boundary is None:
        _print_table()
    else:
        for one in chosen:
            typer.echo(f"{one.id}  {one.digest()}")
            for name in BEHAVIOURS:
                typer.echo(f"  {name}: {getattr(one, name)}")
            for name, value in one.constants.items():
                typer.echo(f"  constant {name}: {value}")
    return 0


def _print_table() -> None:
    table = Table("boundary", "behaviour", "what is promised", box=SIMPLE, pad_edge=False)
    for one in BOUNDARIES:
        table.add_section()
        names = (f"{one.id}", one.digest()[:12], *("" for _ in BEHAVIOURS[2:]))
        for name, behaviour in zip(names, BEHAVIOURS, strict=True):
            table.add_row(name, behaviour, getattr(one, behaviour))
    Console().print(table)
