"""Where benchmark records go; what each says about its origin comes from the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samebits.bench.record import provenance as provenance

ROOT = Path(__file__).resolve().parents[1]


def events_of(run: Path) -> list[dict[str, Any]]:
    """The timeline of a run, event by event."""
    return [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]


def save(name: str, record: dict[str, object]) -> None:
    """Write one record as benchmarks/results/NAME.json."""
    target = ROOT / "benchmarks/results" / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n")
