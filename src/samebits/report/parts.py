"""Pieces of a page: the document around everything, cards, tables, legends."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from samebits.evidence.verdict import Verdict
from samebits.report.style import SCRIPT, STYLE

# The class of the page's style that shows a verdict.
KINDS = {Verdict.SAME: "same", Verdict.DIFFERENT: "different", Verdict.CANNOT_TELL: "unsure"}


def object_of(value: object) -> dict[str, Any]:
    """A JSON object of a record, or an empty one where something else stands: `verify` says so on the page."""
    return value if isinstance(value, dict) else {}


def document(title: str, parts: Sequence[str]) -> str:
    """A page that needs nothing else, around parts that are HTML already."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main><script>{SCRIPT}</script></body></html>\n"
    )


def verdict_box(name: str, verdict: Verdict, text: str) -> str:
    """The verdict on one thing of several, in large letters, and why."""
    return (
        f'<section class="verdict {KINDS[verdict]}" style="margin-bottom:8px"><strong>{escape(verdict.value)}</strong>'
        f"<p><b>{escape(name)}</b>: {escape(text)}</p></section>"
    )


def legend(names: Sequence[tuple[str, str]]) -> str:
    """Names with the colour that each has in the chart above."""
    keys = (f'<span><i style="background: var(--{colour})"></i>{escape(name)}</span>' for name, colour in names)
    return f'<div class="legend">{"".join(keys)}</div>'


def card(title: str, chart: str, note: str, below: str = "") -> str:
    return (
        f'<figure class="card" style="margin:0"><header><h3>{escape(title)}</h3></header>'
        f'<p class="read">{escape(note)}</p>{chart}{below}</figure>'
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already."""

    def cell(tag: str, at: int, text: str) -> str:
        kind = ' class="num"' if at in numeric else ' class="wrap"' if len(text) > 60 else ""
        return f"<{tag}{kind}>{text}</{tag}>"

    header = "".join(cell("th", at, escape(text)) for at, text in enumerate(head))
    body = "".join("<tr>" + "".join(cell("td", at, text) for at, text in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><tr>{header}</tr>{body}</table></div>'
