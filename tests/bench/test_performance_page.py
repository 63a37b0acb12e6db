"""docs/performance.md says what the records say."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_script_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module("render_performance")
    current = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert current == module.page(), "run python benchmarks/render_performance.py"
