"""The table of layouts in the documentation is the committed record's, and the record says what it must."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return runpy.run_path(str(ROOT / "benchmarks/layout_weights.py"))
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks/results/layout_weights.json").read_text())


def test_the_table_is_current(script: dict[str, Any], record: dict[str, Any]) -> None:
    page = (ROOT / "docs/megatron.md").read_text()
    shown = page.split(script["BEGIN"])[1].split(script["END"])[0].strip()
    assert shown == script["table"](record)


def test_strict_weights_are_the_same_in_every_layout_of_the_record(
    script: dict[str, Any], record: dict[str, Any]
) -> None:
    layouts = record["layouts"]
    assert list(layouts) == list(script["LAYOUTS"])
    assert record["steps"] >= 20
    assert len({found["strict"]["weights"] for found in layouts.values()}) == 1
    assert len({tuple(found["strict"]["norms"]) for found in layouts.values()}) == 1
    assert len({tuple(found["default"]["norms"]) for found in layouts.values()}) > 1
