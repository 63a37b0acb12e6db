"""Verifying an ablation: the table again from the arms' records, and the same tokens in every equal-work arm.

Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.ablate.arms import parse_arm
from samebits.ablate.table import ABLATION, HEAD, PLAN, SCHEMA, cells, collect
from samebits.contract.routes import MODULES
from samebits.evidence.store import MANIFEST
from samebits.evidence.verdict import Verdict
from samebits.evidence.verify import load_object

_SHARED = ("contract", "packages", "inputs")
# Settings that an arm has of its own; its modules' cases are checked with its numbers.
_OWN = ("native_compile", *(f"{module}_case" for module in MODULES))


@dataclass(frozen=True, kw_only=True)
class AblationVerification:
    """The verdict, the first fault, and the table recomputed from the arms."""

    verdict: Verdict
    problems: tuple[str, ...] = ()
    table: Mapping[str, Any] = field(default_factory=dict)


def is_ablation(folder: Path) -> bool:
    """Also one that has not come to its end."""
    return (folder / ABLATION).is_file() or (folder / PLAN).is_file()


def verify_ablation(folder: Path) -> AblationVerification:
    """Never raises for what lies in the folder."""
    if not (folder / ABLATION).exists():
        unfinished = f"{ABLATION} is missing, so the ablation did not come to its end: the same command goes on with it"
        return AblationVerification(verdict=Verdict.CANNOT_TELL, problems=(unfinished,))
    try:
        claimed = load_object(folder, ABLATION)
        plan = _plan(claimed)
        table = collect(folder, plan, _reasons(claimed))
        problem = _differs(claimed, table) or _arms_differ(folder, plan)
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        return AblationVerification(verdict=Verdict.CANNOT_TELL, problems=(f"{ABLATION}: {error!s}",))
    if problem:
        return AblationVerification(verdict=Verdict.CANNOT_TELL, problems=(problem,), table=table)
    verdict = Verdict(table["verdict"])
    unsure = tuple(
        f"{view} {row['arm']}: {row['problem']}" for view, rows in table["views"].items() for row in rows
        if row["status"] == Verdict.CANNOT_TELL.value
    )  # fmt: skip
    return AblationVerification(verdict=verdict, problems=unsure, table=table)


def _plan(claimed: Mapping[str, Any]) -> dict[str, Any]:
    if claimed.get("schema") != SCHEMA:
        raise ValueError(f"schema is {claimed.get('schema')!r}, want {SCHEMA!r}")
    plan = claimed["plan"]
    if plan["views"] not in (["free"], ["free", "equal"]) or plan["tokens_of"] not in plan["arms"]:
        raise ValueError("its plan names unknown views, or tokens of an arm that it does not hold")
    for name in plan["arms"]:
        if "/" in name or parse_arm(name).name != name:
            raise ValueError(f"{name!r} is no arm")
    return dict(plan)


def _reasons(claimed: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Why an arm broke off is known from the table alone; that it did is seen from its folder."""
    return {(view, row["arm"]): row["problem"] for view, rows in claimed["views"].items() for row in rows}


def _differs(claimed: Mapping[str, Any], table: Mapping[str, Any]) -> str | None:
    for view, rows in table["views"].items():
        lines = claimed["views"].get(view)
        if not isinstance(lines, list) or len(lines) != len(rows):
            return f"{ABLATION}: view {view} does not hold the plan's arms"
        for line, row in zip(lines, rows, strict=True):
            for key in row:
                if line.get(key) != row[key]:
                    return f"{ABLATION}: {view} {row['arm']}: {key} is {line.get(key)!r}, the records give {row[key]!r}"
    if claimed.get("verdict") != table["verdict"]:
        return f"{ABLATION}: verdict is {claimed.get('verdict')!r}, the records give {table['verdict']!r}"
    return None


def _arms_differ(folder: Path, plan: Mapping[str, Any]) -> str | None:
    """The first arm that was run under another contract, other packages, inputs or settings than the plan's."""
    for view in plan["views"]:
        for arm in plan["arms"]:
            run = folder / view / arm
            if not (run / MANIFEST).is_file():
                continue
            manifest = load_object(run, MANIFEST)
            found = {**manifest, "contract": manifest.get("contract", {}).get("digest")}
            for key in _SHARED:
                if found.get(key) != plan[key]:
                    return f"{view} {arm}: its {key} are not those of the plan"
            for key in plan["config"].keys() - set(_OWN):
                if manifest["config"].get(key) != plan["config"][key]:
                    return f"{view} {arm}: its config.{key} is not that of the plan"
    return None


def describe(found: AblationVerification) -> str:
    """The verification in plain lines, one per arm."""
    lines = [f"verdict: {found.verdict.value}", *(f"problem: {problem}" for problem in found.problems)]
    for view, rows in found.table.get("views", {}).items():
        for row in rows:
            pairs = zip(HEAD[4:], cells(row)[4:], strict=True)
            lines.append(f"{view} {row['arm']}: {', '.join(f'{name} {text}' for name, text in pairs)}")
    return "\n".join(lines)


def to_json(found: AblationVerification) -> str:
    """The verification as one JSON object."""
    data = {"verdict": found.verdict.value, "problems": list(found.problems), "table": dict(found.table)}
    return json.dumps(data, allow_nan=False)
