"""docs/contract says what the boundaries say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from samebits.cli.contract import docs_command
from samebits.contract import BEHAVIOURS, Boundary
from samebits.contract.boundaries import BOUNDARIES
from samebits.contract.drawing import drawing
from samebits.contract.pages import page, pages

FOLDER = Path(__file__).parents[2] / "docs/contract"


def test_the_pages_are_current() -> None:
    wanted = pages(BOUNDARIES)
    found = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.iterdir()}
    stale = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    assert stale == [], "run `samebits contract docs` and commit docs/contract"


def test_the_command_writes_what_the_test_wants(tmp_path: Path) -> None:
    assert docs_command(tmp_path / "pages") == 0
    written = {file.name: file.read_text(encoding="utf-8") for file in (tmp_path / "pages").iterdir()}
    assert written == pages(BOUNDARIES)


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert docs_command(tmp_path / "file") == 2
    assert capsys.readouterr().err.startswith("error: cannot write the pages")


@pytest.mark.parametrize("boundary", BOUNDARIES, ids=lambda one: one.name)
def test_a_page_holds_everything(boundary: Boundary) -> None:
    text = page(boundary)
    assert f"Version {boundary.version}, digest `{boundary.digest()}`" in text
    assert drawing(boundary) in text
    for behaviour in (*BEHAVIOURS, "special values"):
        assert f"| {behaviour} | " in text
    assert boundary.specials


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_a_page_changes_with_each_behaviour(behaviour: str) -> None:
    one = BOUNDARIES[0]
    other = dataclasses.replace(one, **{behaviour: "another | rule"})
    assert page(other) != page(one)
    assert f"| {behaviour} | another \\| rule |" in page(other)
