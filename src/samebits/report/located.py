"""The page's section about what `samebits locate` found in this run, from its located.json."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from samebits.report.parts import object_of

SCHEMA = "samebits.locate/1"


def located_section(record: Mapping[str, Any]) -> str:
    """HTML; empty where the record is none of this schema. What has another form than `locate` gives it is left out."""
    if record.get("schema") != SCHEMA:
        return ""
    kind = f" · {record['kind']}" if record.get("kind") else ""
    parts = [f"<h2>Located</h2><p><b>{_text(record.get('verdict'))}{_text(kind)}</b></p>"]
    parts.append(f"<p>{_text(record.get('summary'))}</p>")
    lines = [_side(name, side) for name in ("trainer", "rollout") if (side := object_of(record.get(name)))]
    lines += [_difference(object_of(one)) for one in _list(record.get("differences"))[:3]]
    lines += [_text(hint) for hint in _list(record.get("hints"))]
    if record.get("repro"):
        lines.append(f"without either engine: <code>python -m pytest {_text(record['repro'])}</code>")
    return "".join(parts) + f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


def _side(name: str, side: Mapping[str, Any]) -> str:
    gives = side.get("gives_the_contract")
    said = f", {'gives' if gives else 'does not give'} the contract's bits" if isinstance(gives, bool) else ""
    return f"{name}: route {_text(side.get('route'))}, <code>{_text(side.get('implementation'))}</code>{escape(said)}"


def _difference(one: Mapping[str, Any]) -> str:
    first = object_of(one.get("first"))
    return (
        f"{_text(one.get('point'))}: {_text(one.get('count'))} of {_text(one.get('total'))} values differ; column "
        f"{_text(first.get('column'))}: <code>{_text(first.get('left'))}</code> against "
        f"<code>{_text(first.get('right'))}</code>, {_text(first.get('ulps'))} ULP"
    )


def _text(value: object) -> str:
    return escape(str(value))


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []
