"""The page: its verdict, its numbers, and nothing that needs a network or trusts a record."""

from __future__ import annotations

import io
import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from samebits.contract import run_contract
from samebits.contract.boundaries.linear import LINEAR
from samebits.evidence.verify import verify
from samebits.report import write_report
from samebits.report.charts import bar_chart, line_chart, number, stacked_chart, ticks
from samebits.report.series import collect
from samebits.report.terminal import print_report
from samebits.testing.runs import write_run
from samebits.timeline.ledger import read


class Reader(HTMLParser):
    """Collects tags, attributes and text, and checks that tags close in order."""

    VOID = ("meta", "br", "line", "circle", "rect", "path")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words += data


def page(run: Path) -> Reader:
    reader = Reader()
    reader.feed(write_report(run).read_text(encoding="utf-8"))
    assert reader.open == []
    return reader


@pytest.mark.parametrize(
    ("options", "title"),
    [({}, "Same bits"), ({"flips": {(1, 0)}, "case": "P/P"}, "Different"), ({"seal": False}, "Cannot tell")],
)
def test_the_verdict_comes_first(tmp_path: Path, options: dict, title: str) -> None:
    write_run(tmp_path / "run", **options)
    words = page(tmp_path / "run").words
    assert title in words
    for other in {"Same bits", "Different", "Cannot tell"} - {title}:
        assert other not in words


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    for tag, attributes in page(tmp_path / "run").tags:
        assert tag not in ("link", "img", "iframe", "object")
        assert not {"src", "href"} & set(attributes)
    text = (tmp_path / "run" / "report.html").read_text()
    assert "http" not in text
    assert "url(" not in text


def test_every_behaviour_of_a_boundary_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    manifest["contract"]["content"]["boundaries"] = run_contract([LINEAR], segments=1).as_data()["boundaries"]
    (tmp_path / "run/manifest.json").write_text(json.dumps(manifest))
    words = page(tmp_path / "run").words
    for text in ("special values", LINEAR.merge, LINEAR.primitives, LINEAR.specials):
        assert text in words


def test_every_quantity_has_its_chart(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=3)
    reader = page(tmp_path / "run")
    charts = [
        json.loads(attributes["data-points"] or "")
        for tag, attributes in reader.tags
        if attributes.get("class") == "chart"
    ]
    assert len(charts) == 13
    assert [point[0] for point in charts[0]] == [1, 2, 3]
    for title in ("mismatch_count", "max_abs_diff", "Reward", "Held-out accuracy", "KL", "Gradient norm", "Loss"):
        assert title in reader.words
    for title in ("Response length", "tokens per second", "Seconds per step", "0 in every step", "R samebits"):
        assert title in reader.words


def test_series_agree_with_the_totals(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=4, flips={(2, 1), (3, 0), (3, 4)})
    series = collect(read(tmp_path / "run" / "timeline.jsonl").events)
    totals = verify(tmp_path / "run").totals
    assert [value for _, value in series.points("mismatch_count")] == [0, 1, 2, 0]
    assert math.fsum(value for _, value in series.points("compared_tokens")) == totals["compared_tokens"]
    assert max(value for _, value in series.points("max_abs_diff")) == totals["max_abs_diff"]


def test_hostile_records_are_shown_as_text(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    route = next((tmp_path / "run" / "routes").iterdir())
    record = json.loads(route.read_text())
    record["modules"]["<script>alert(1)</script>"] = {"group": "<b>", "route": "<i>", "calls": "<u>"}
    route.write_text(json.dumps(record))
    (tmp_path / "run" / "manifest.json").write_text('{"config": {"<img src=x>": "<img src=y>"}, "files": 3}')
    reader = page(tmp_path / "run")
    assert not {"img", "u"} & {tag for tag, _ in reader.tags}
    assert sum(tag == "script" for tag, _ in reader.tags) == 1


ODD_ROUTES: list[dict[str, Any]] = [
    {"modules": {"a": 1}}, {"modules": [1]}, {"counters": {"a": "x"}}, {"counters": {"a": 10**400}}, {"rank": [1]},
    {"counters": {"a": -(10**400)}},
]  # fmt: skip


@pytest.mark.parametrize("changes", ODD_ROUTES, ids=str)
def test_route_records_of_any_form_have_a_page(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_run(tmp_path / "run")
    route = next((tmp_path / "run" / "routes").iterdir())
    route.write_text(json.dumps({**json.loads(route.read_text()), **changes}))
    (tmp_path / "run" / "manifest.json").write_text('{"contract": {"content": {"boundaries": {"a": 1}}}, "config": 3}')
    assert "Cannot tell" in page(tmp_path / "run").words


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("sampled", {"reward": 1.7e308}),
        ("timed", {"seconds": {"generate": 1.7e308, "train": 1.7e308}}),
        ("timed", {"seconds": {"generate": 5e-324}}),
        ("trained", {"loss": -1.7e308, "kl": 1.7e308}),
        ("compared", {"max_abs_diff": 1.7e308}),
    ],
)
def test_values_that_no_chart_can_draw_have_a_page(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    write_run(tmp_path / "run")
    timeline = tmp_path / "run" / "timeline.jsonl"
    lines = [json.loads(line) for line in timeline.read_text().splitlines()]
    timeline.write_text("".join(json.dumps({**x, **changes} if x["kind"] == kind else x) + "\n" for x in lines))
    assert "Cannot tell" in page(tmp_path / "run").words
    print_report([tmp_path / "run"], Console(file=io.StringIO()))


VALUES = st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=60)


@given(values=VALUES, zero=st.booleans())
def test_charts_draw_any_values_inside_their_frame(values: list[float], zero: bool) -> None:
    points = list(enumerate(values, start=1))
    for svg in (line_chart(points, zero=zero), bar_chart([(step, abs(value)) for step, value in points])):
        reader = Reader()
        reader.feed(svg)
        assert "nan" not in svg
        for tag, attributes in reader.tags:
            if tag == "circle":
                assert 0 <= float(attributes["cx"] or "") <= 400
                assert 0 <= float(attributes["cy"] or "") <= 190
            if tag == "rect":
                assert float(attributes["height"] or "") > 0
                assert float(attributes["y"] or "") >= 0


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-6, 1e6))
def test_ticks_are_few_and_inside(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert 1 <= len(found) <= 6
    assert all(low - span * 1e-3 <= value <= low + span * 1.001 for value in found)


def test_a_stack_adds_up() -> None:
    svg = stacked_chart([(1, [("a", 1.0), ("b", 2.0)]), (2, [("a", 0.0), ("b", 3.0)])])
    assert "3.00 s (a 1.00, b 2.00)" in svg


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (12345, "12\u2009345"), (0.12345678, "0.1235"), (5.48e-5, "5.48e-05"), (-0.5, "-0.5")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text
