"""The documents about the boundaries, made from the boundaries: Markdown, one page each and an index."""

from __future__ import annotations

from collections.abc import Sequence

from samebits.contract.boundary import BEHAVIOURS, Boundary
from samebits.contract.drawing import drawing

INDEX = "README.md"
COMMAND = "samebits contract docs"
_MADE = f"<!-- made by `{COMMAND}`; change the boundary, not this page -->"


def pages(boundaries: Sequence[Boundary]) -> dict[str, str]:
    """File name -> text of every page, the index first."""
    return {INDEX: index(boundaries), **{page_name(one): page(one) for one in boundaries}}


def page_name(boundary: Boundary) -> str:
    return f"{boundary.name}.md"


def index(boundaries: Sequence[Boundary]) -> str:
    """What boundaries there are, at which version, under which digest."""
    lines = [
        "# The contract's boundaries",
        "",
        _MADE,
        "",
        "A boundary states which values take part in a computation, how they are cut, in which order the parts",
        "merge, and where a value is rounded. Schedules (threads, batches, pages, ranks) are no part of it. A run",
        "contract is all boundaries, the arithmetic, the number of K segments and the model's constants: processes",
        "that hold one run contract give the same bits, and processes that don't refuse to work together.",
        "",
        "| boundary | depends on | digest |",
        "| --- | --- | --- |",
    ]
    for one in boundaries:
        link = f"[{one.id}]({page_name(one)})"
        lines.append(f"| {link} | {_cell(one.dependency)} | `{one.digest()[:12]}` |")
    return "\n".join([*lines, ""])


def page(boundary: Boundary) -> str:
    """The six behaviours of one boundary, its constants, its merge order as a drawing, its digest."""
    lines = [f"# {boundary.name}", "", _MADE, ""]
    lines += [f"Version {boundary.version}, digest `{boundary.digest()}`.", "", "| behaviour | |", "| --- | --- |"]
    lines += [f"| {behaviour} | {_cell(getattr(boundary, behaviour))} |" for behaviour in BEHAVIOURS]
    lines.append(f"| special values | {_cell(boundary.specials)} |")
    if boundary.constants:
        lines += ["", "| constant | value |", "| --- | --- |"]
        lines += [f"| {name} | {_cell(str(value))} |" for name, value in boundary.constants.items()]
    drawn = drawing(boundary)
    if drawn:
        lines += ["", "## Merge order", "", "```text", drawn, "```"]
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    """Text as one table cell: Markdown's own signs escaped."""
    for sign in ("\\", "|", "*", "_", "<"):
        text = text.replace(sign, f"\\{sign}")
    return text
