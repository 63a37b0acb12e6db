"""docs/performance.md says what the records say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_script_renders() -> None:
    path = ROOT / "benchmarks/render_performance.py"
    spec = importlib.util.spec_from_file_location("render_performance", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    current = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert current == module.page(), "run python benchmarks/render_performance.py"
