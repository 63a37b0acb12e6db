"""The page's section about what `samebits locate` found in this run, from its located.json."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

SCHEMA = "samebits.locate/1"


def located_section(record: Mapping[str, Any]) -> str:
    """HTML; empty where the record is none of this schema."""
    if record.get("schema") != SCHEMA:
        return ""
    kind = f" · {record['kind']}" if record.get("kind") else ""
    parts = [f"<h2>Located</h2><p><b>{escape(str(record.get('verdict')))}{escape(kind)}</b></p>"]
    parts.append(f"<p>{escape(str(record.get('summary')))}</p>")
    lines = [line for side in ("trainer", "rollout") if (line := _side(side, record.get(side)))]
    differences = record.get("differences")
    lines += [_difference(one) for one in differences[:3] if isinstance(one, dict)] if differences else []
    lines += [escape(str(hint)) for hint in record.get("hints") or ()]
    if record.get("repro"):
        lines.append(f"without either engine: <code>python -m pytest {escape(str(record['repro']))}</code>")
    return "".join(parts) + f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


def _side(name: str, side: object) -> str:
    if not isinstance(side, dict):
        return ""
    answer = {True: "gives the contract's bits", False: "does not give the contract's bits"}
    said = answer.get(side.get("gives_the_contract"), "")  # type: ignore[arg-type]
    code = f"<code>{escape(str(side.get('implementation')))}</code>"
    return f"{name}: route {escape(str(side.get('route')))}, {code}{', ' + escape(said) if said else ''}"


def _difference(one: Mapping[str, Any]) -> str:
    first = one.get("first") or {}
    return (
        f"{escape(str(one.get('point')))}: {one.get('count')} of {one.get('total')} values differ; column "
        f"{first.get('column')}: <code>{escape(str(first.get('left')))}</code> against "
        f"<code>{escape(str(first.get('right')))}</code>, {first.get('ulps')} ULP"
    )
