"""Ratios as one SVG: a bar per comparison on a logarithmic axis, its goal as a tick."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

ROW, LABEL, PLOT, TOP, BOTTOM = 20, 420, 330, 44, 30
LOW, HIGH = 0.125, 8.0

STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1a1a1a}.t{font-size:14px;font-weight:600}.g{stroke:#d6d6d6}"
    ".one{stroke:#666}.met{fill:#2a7f62}.miss{fill:#c4622d}.free{fill:#7a8794}.goal{stroke:#1a1a1a;stroke-width:2}"
    "rect.page{fill:#fff}"
)


def ratio_plot(title: str, records: Sequence[Mapping[str, Any]]) -> str:
    """The picture of `records` (as `Record.as_data` gives them): to the right of 1, samebits is faster."""
    height = TOP + ROW * len(records) + BOTTOM
    width = LABEL + PLOT + 60
    marks = [f'<rect class="page" width="{width}" height="{height}"/>', f'<text class="t" x="10" y="20">{title}</text>']
    exponent = int(math.log2(LOW))
    while 2.0**exponent <= HIGH:
        at = _x(2.0**exponent)
        kind = "one" if exponent == 0 else "g"
        marks.append(f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 8}" y2="{height - BOTTOM + 4}"/>')
        marks.append(f'<text x="{at:.1f}" y="{height - 10}" text-anchor="middle">{2.0**exponent:g}x</text>')
        exponent += 1
    for row, record in enumerate(records):
        marks += _bar(TOP + ROW * row, record)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}"><style>{STYLE}</style>{"".join(marks)}</svg>\n'
    )


def _bar(y: float, record: Mapping[str, Any]) -> list[str]:
    ratio, goal = float(record["ratio"]), record["goal"]
    kind = "free" if goal is None else "miss" if record["missed"] else "met"
    start, end = sorted((_x(1.0), _x(ratio)))
    label = f"{record['what']} {record['shape']} / {record['peer']}"
    marks = [
        f'<text x="{LABEL - 12}" y="{y + 11}" text-anchor="end" textLength="{min(len(label) * 6, LABEL - 20)}" '
        f'lengthAdjust="spacingAndGlyphs">{escape(label)}</text>',
        f'<rect class="{kind}" x="{start:.1f}" y="{y + 1}" width="{max(end - start, 1):.1f}" height="{ROW - 7}"/>',
        f'<text x="{LABEL + PLOT + 12}" y="{y + 11}">{ratio:.2f}x</text>',
    ]
    if goal is not None:
        marks.append(
            f'<line class="goal" x1="{_x(goal):.1f}" x2="{_x(goal):.1f}" y1="{y - 1}" y2="{y + ROW - 4}">'
            f"<title>goal {goal:g}x</title></line>"
        )
    return marks


def _x(ratio: float) -> float:
    share = math.log2(min(max(ratio, LOW), HIGH) / LOW) / math.log2(HIGH / LOW)
    return LABEL + share * PLOT
