"""What a matrix leaves behind: one JSON record, the same as a Markdown table, and one file per finished layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samebits.evidence.store import json_bytes, write_whole
from samebits.timeline.events import parse_json

SCHEMA = "samebits.matrix/1"
RECORD, TABLE = "matrix.json", "matrix.md"
HOW = {
    "score": "each layout was started once. The first rollout layout drew the tokens; every trainer layout scored "
    "those tokens, every other rollout layout drew them again from the same keys and scored them while it did. A pair "
    "compares what its two layouts said. Optimiser steps, where there are any, are taken on the same tokens",
    "train": "one whole run for each pair, each with a run directory of its own that `samebits verify` checks",
}


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Writes one JSON file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json_bytes(record))


def read_finished(path: Path, key: str) -> dict[str, Any] | None:
    """The content that was written under the same key, if it was: what can't be read has to be done again."""
    try:
        found = parse_json(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return found.get("content") if isinstance(found, dict) and found.get("key") == key else None


def write_finished(path: Path, key: str, content: Mapping[str, Any]) -> None:
    write_json(path, {"key": key, "content": content})


def columns(record: Mapping[str, Any]) -> list[str]:
    """The heads of the table of pairs."""
    counts = ["tokens", "mismatch_count", "max_abs_diff"]
    weights = ["weights", "as first"] if any(pair["weights"] for pair in record["pairs"]) else []
    return ["trainer", "rollout", "verdict", *counts, "log-probabilities", "as first", *weights]


def rows(record: Mapping[str, Any]) -> list[list[str]]:
    """The table of pairs, cell by cell."""
    weights = len(columns(record)) > 8
    return [[*_cells(pair), *(_weight_cells(pair) if weights else [])] for pair in record["pairs"]]


def _cells(pair: Mapping[str, Any]) -> list[str]:
    if pair["verdict"] == "cannot tell":
        return [pair["trainer"], pair["rollout"], pair["verdict"], "", "", "", pair["problem"], ""]
    return [
        pair["trainer"],
        pair["rollout"],
        pair["verdict"],
        f"{pair['compared_tokens']:,}",
        f"{pair['mismatch_count']:,}",
        f"{pair['max_abs_diff']:.3g}",
        pair["logp"][:12],
        _yes(pair["logp_as_reference"]),
    ]


def _weight_cells(pair: Mapping[str, Any]) -> list[str]:
    return [pair["weights"][:12], _yes(pair["weights_as_reference"])] if pair["weights"] else ["", ""]


def _yes(same: bool) -> str:
    return "yes" if same else "NO"


def markdown(record: Mapping[str, Any]) -> str:
    """The record as a page: how it was made, and the table."""
    heads = columns(record)
    lines = [
        f"{len(record['pairs'])} pairs: **{record['verdict']}**. Form `{record['form']}`: {record['how']}.",
        "",
        f"Run contract `{record['contract'][:12]}`, {record['max_tp']} K segments. Digests are the first 12 digits of "
        "a SHA-256; `as first` compares with the first layouts of both sides.",
        "",
        "| " + " | ".join(heads) + " |",
        "| " + " | ".join("---" for _ in heads) + " |",
        *("| " + " | ".join(map(_on_one_line, cells)) + " |" for cells in rows(record)),
    ]
    return "\n".join(lines) + "\n"


def _on_one_line(cell: str) -> str:
    """An error's text may have lines, and bars, which end a cell."""
    return " ".join(cell.split()).replace("|", "\\|")


def grid(record: Mapping[str, Any]) -> str:
    """The record as one row per trainer layout and one column per rollout layout: mismatches of compared tokens."""
    found = {(pair["trainer"], pair["rollout"]): pair for pair in record["pairs"]}
    trainers, rollouts = (list(dict.fromkeys(pair[at] for pair in found)) for at in (0, 1))
    steps = record["steps"]
    heads = [
        "trainer \\ rollout",
        "ranks",
        *rollouts,
        *(["loss of step 1", f"weights after {steps} steps"] if steps else []),
    ]
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    for name in trainers:
        layout = record["layouts"][f"trainer {name}"]
        cells = [name, str(layout.get("processes", "")), *(_cell(found.get((name, other))) for other in rollouts)]
        if steps:
            taken = layout.get("steps")
            cells += [repr(taken[0]["loss"]), taken[-1]["weights"][:12]] if taken else ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(pair: Mapping[str, Any] | None) -> str:
    if pair is None:
        return ""
    if pair["verdict"] == "cannot tell":
        return "cannot tell"
    same = "" if pair["logp_as_reference"] else ", not as first"
    return f"{pair['mismatch_count']:,} of {pair['compared_tokens']:,}{same}"
