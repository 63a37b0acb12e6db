"""What all sections of docs/performance.md are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

Data = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def origin(data: Data) -> str:
    """Where the records come from, in one line."""
    o = data["origin"]
    versions = ", ".join(f"{name} {number}" for name, number in o["versions"].items() if number)
    driver = o["driver"] or "not recorded"
    return f"{o['card']}, driver {driver}, CUDA {o['cuda']}, {versions}; commit `{o['commit'][:12]}`."


def geometric_mean(values: Sequence[float]) -> float:
    """The n-th root of the product."""
    return math.exp(sum(math.log(v) for v in values) / len(values))
