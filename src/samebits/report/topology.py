"""A picture of who ran: trainer ranks, rollout engines with their workers, and what travels between them."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

_BOX, _GAP, _ROW = 76, 10, 46


def topology(config: Mapping[str, Any]) -> str:
    """An SVG of the layout that a run's settings declare; empty when they do not say."""
    trainer = {name: _count(config, f"train_{name}") for name in ("tp", "cp", "pp", "dp")}
    ranks = 1
    for size in trainer.values():
        ranks *= size
    engines, workers = _count(config, "rollout_engines"), _count(config, "rollout_tp")
    if max(ranks, engines * workers) > 64:
        return ""
    split = " ".join(f"{name.upper()}{size}" for name, size in trainer.items() if size > 1) or "one rank"
    left = _boxes(f"Trainer: Megatron-Core, {split}", [f"rank {rank}" for rank in range(ranks)], 10)
    names = [f"engine {e}" + (f" worker {w}" if workers > 1 else "") for e in range(engines) for w in range(workers)]
    right = _boxes(f"Rollout: vLLM, {engines} engine(s), TP{workers}", names, 400)
    height = 46 + _ROW * max(-(-ranks // 3), -(-len(names) // 3)) + 8
    middle = height / 2 + 8
    text = f"{ranks} trainer rank(s), {engines} rollout engine(s) with {workers} worker(s) each"
    return (
        f'<svg class="topology" viewBox="0 0 680 {height}" role="img" aria-label="{escape(text)}">{left}{right}'
        f"{_arrow(284, 392, middle - 9, 'weights, by digest')}{_arrow(392, 284, middle + 15, 'tokens, bits')}</svg>"
    )


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name, 1)
    return value if type(value) is int and value > 0 else 1


def _boxes(title: str, names: list[str], x: int) -> str:
    parts = [f'<text class="side" x="{x}" y="20">{escape(title)}</text>']
    for at, name in enumerate(names):
        left, top = x + (at % 3) * (_BOX + _GAP), 34 + (at // 3) * _ROW
        parts.append(f'<rect class="box" x="{left}" y="{top}" width="{_BOX}" height="34" rx="6"/>')
        words = name.split(" worker ")
        for line, word in enumerate(words if len(words) == 1 else [words[0], f"worker {words[1]}"]):
            y = top + (21 if len(words) == 1 else 15 + 13 * line)
            parts.append(f'<text class="in" x="{left + _BOX / 2}" y="{y}" text-anchor="middle">{escape(word)}</text>')
    return "".join(parts)


def _arrow(start: int, stop: int, y: float, label: str) -> str:
    tip = 6 if stop > start else -6
    return (
        f'<line class="wire" x1="{start}" x2="{stop}" y1="{y}" y2="{y}"/>'
        f'<path class="tip" d="M{stop} {y} l{-tip} -4 v8 z"/>'
        f'<text class="in" x="{(start + stop) / 2}" y="{y - 4}" text-anchor="middle">{escape(label)}</text>'
    )
