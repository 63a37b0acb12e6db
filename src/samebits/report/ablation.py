"""The page of an ablation: the verdict, a table for each view, and how far the arms drifted step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from samebits.ablate.check import AblationVerification, verify_ablation
from samebits.ablate.table import HEAD, TITLES, cells, notes
from samebits.contract.routes import MODULES
from samebits.evidence.store import REPORT, SEAL, TIMELINE, write_whole
from samebits.evidence.verdict import Verdict
from samebits.report.charts import lines_chart
from samebits.report.compare import COLOURS
from samebits.report.parts import KINDS, card, document, legend, table, verdict_box
from samebits.report.series import collect
from samebits.timeline.ledger import read

# M000 to M111 make two charts of four: native attention, strict attention.
ARMS_PER_CHART = 4
CHARTS = (("mean_abs_diff", "mean abs dlogp per step"), ("mismatch_count", "mismatch_count per step"))
WORDS = {
    Verdict.SAME: "Every arm proves its route, and fully strict arms have the same bits on both sides.",
    Verdict.DIFFERENT: "A fully strict arm has different bits.",
}


def write_ablation_report(folder: Path, page: Path | None = None) -> Path:
    """Writes `page`, or report.html into an ablation's folder, from its arms as they verify now. Raises OSError."""
    found = verify_ablation(folder)
    text = "; ".join(found.problems) or WORDS.get(found.verdict, "")
    parts = [f"<h1>samebits · ablation {escape(folder.resolve().name)}</h1>"]
    parts += [verdict_box("ablation", found.verdict, text), *_views(folder, found)]
    page = page or folder / REPORT
    write_whole(page, document(f"{found.verdict.value} · ablation", parts).encode())
    return page


def _views(folder: Path, found: AblationVerification) -> list[str]:
    parts = []
    for view, rows in found.table.get("views", {}).items():
        body = [_cells(row) for row in rows]
        parts.append(f"<h2>{escape(TITLES[view])}</h2>{table(HEAD, body, range(5, len(HEAD)))}")
        parts += [f"<p>{escape(note)}</p>" for note in notes(rows)]
        parts.append(_charts(folder / view, [row["arm"] for row in rows]))
    return parts


def _cells(row: Mapping[str, Any]) -> list[str]:
    texts = [escape(text) for text in cells(row)]
    for at in range(1, 1 + len(MODULES)):
        kind = {"R/R": "R", "P/P": "P"}.get(texts[at], "")
        texts[at] = f'<span class="route {kind}">{texts[at]}</span>'
    kind = KINDS[Verdict(row["status"])]
    texts[4] = f'<span class="{kind}"><strong>{texts[4]}</strong></span>'
    return texts


def _charts(folder: Path, arms: Sequence[str]) -> str:
    """Lines of the arms that came to their end, a few to each chart."""
    sealed = [arm for arm in arms if (folder / arm / SEAL).is_file()]
    series = {arm: collect(read(folder / arm / TIMELINE).events) for arm in sealed}
    cards = []
    for first in range(0, len(sealed), ARMS_PER_CHART):
        shown = sealed[first : first + ARMS_PER_CHART]
        below = legend([(arm, COLOURS[at]) for at, arm in enumerate(shown)])
        for name, title in CHARTS:
            points = [series[arm].points(name) for arm in shown]
            if all(points):
                cards.append(card(title, lines_chart(points, zero=True), "", below))
    return f'<div class="cards">{"".join(cards)}</div>'
