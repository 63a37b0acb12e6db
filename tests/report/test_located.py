"""The page's section about what was located."""

from __future__ import annotations

from typing import Any

import pytest

from samebits.cli.located import show
from samebits.evidence.verdict import Verdict
from samebits.locate.result import Located, SideFacts, Where
from samebits.report.located import located_section


def test_what_was_located_is_on_the_page() -> None:
    side = SideFacts(route="R", implementation="a.B<c>", parameters={}, gives_the_contract=False)
    where = Where(
        site="attention",
        layer=1,
        boundary="attention",
        group="attention",
        sequence="1/2/3",
        index=4,
        tokens_differing=1,
        tokens_compared=2,
        region=(),
    )
    found = Located(
        verdict=Verdict.DIFFERENT,
        kind="operator",
        summary=f"{where}: differs",
        where=where,
        trainer=side,
        rollout=side,
        hints=("a & b",),
        repro="locate/test_repro.py",
    )
    html = located_section(found.as_data())
    assert "attention of layer 1, token 4 of sample 1/2/3: differs" in html
    assert "<code>a.B&lt;c&gt;</code>, does not give the contract&#x27;s bits" in html
    assert "a &amp; b" in html
    assert "python -m pytest locate/test_repro.py" in html


def test_a_narrow_terminal_shows_all_of_a_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "samebits.into_megatron.modules.StrictNorm"
    side = SideFacts(route="R", implementation=name, parameters={"eps": 1e-06}, gives_the_contract=True)
    show(Located(verdict=Verdict.DIFFERENT, summary="differs", trainer=side, rollout=side))
    assert capsys.readouterr().out.count(f" {name} ") == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"differences": {"a": 1}},
        {"differences": [1, {"first": "x"}]},
        {
            "differences": [
                {"count": "<script>", "total": "<script>", "first": {"column": "<script>", "ulps": "<script>"}}
            ]
        },
        {"hints": 5, "kind": ["<script>"], "repro": {"<script>": 1}},
        {"trainer": {"gives_the_contract": [1]}, "rollout": "<script>"},
    ],
)
def test_a_record_of_any_form_is_shown_as_text(changes: dict[str, Any]) -> None:
    record = {"schema": "samebits.locate/1", "verdict": "different", "summary": "differs"}
    html = located_section({**record, **changes})
    assert "differs" in html
    assert "<script>" not in html


def test_another_record_is_left_out() -> None:
    assert located_section({}) == ""
    assert located_section({"schema": "samebits.locate/2"}) == ""
