"""The table of an ablation, from the arms' own records: every number is recomputed from raw bits by `verify`.

Standard library only. Two views are kept apart. Free-running: each arm draws its own tokens, so arms differ in length
and text. Equal work: every arm produces the same recorded tokens, which is checked here, token by token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from samebits.ablate.arms import parse_arm
from samebits.contract.routes import MODULES
from samebits.evidence.sidecar import sidecar_name
from samebits.evidence.speed import speed
from samebits.evidence.store import SEAL, TIMELINE, sha256_file
from samebits.evidence.tensors import read_tensors
from samebits.evidence.verdict import Verdict
from samebits.evidence.verify import verify
from samebits.timeline.ledger import read

PLAN, ABLATION, ABLATION_TEXT = "plan.json", "ablation.json", "ablation.md"
SCHEMA = "samebits.ablation/1"
TITLES = {
    "free": "Free-running: each arm drew its own tokens",
    "equal": "Equal work: every arm produced the same recorded tokens",
}
_IDENTITY = ("sample_keys", "sample_offsets", "prompt_lengths", "token_ids")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arm in one view. Counts are None where there is nothing that could be counted, never 0.

    `tokens_per_second` is generated tokens over seconds of generation, without the `warm_up` first steps.
    """

    arm: str
    cases: dict[str, str]
    status: str
    problem: str | None = None
    mismatch_count: int | None = None
    compared_tokens: int | None = None
    mean_abs_diff: float | None = None
    max_abs_diff: float | None = None
    worst: str | None = None
    tokens_per_second: float | None = None
    seconds_per_step: float | None = None
    warm_up: int | None = None
    tokens_sha256: str | None = None
    seal_sha256: str | None = None


def row_of(arm: str, run: Path, reason: str | None = None, tokens: str | None = None) -> Row:
    """What the records of one arm give. `reason` says why it broke off; `tokens` is the digest that its tokens need."""
    cases = parse_arm(arm).by_module()
    unsure = partial(Row, arm=arm, cases=cases, status=Verdict.CANNOT_TELL.value)
    if not (run / SEAL).is_file():
        return unsure(problem=reason or "it did not come to its end")
    found = verify(run)
    if found.problems:
        return unsure(problem=found.problems[0])
    if found.totals["modules"] != cases:
        return unsure(problem="the run in its folder has other cases")
    totals = found.totals
    fast = speed(read(run / TIMELINE).events)
    held = tokens_digest(run, totals["steps"])
    alien = tokens is not None and held != tokens
    return Row(
        arm=arm,
        cases=cases,
        status=Verdict.CANNOT_TELL.value if alien else found.verdict.value,
        problem="its tokens are not the recorded ones" if alien else None,
        mismatch_count=totals["mismatch_count"],
        compared_tokens=totals["compared_tokens"],
        mean_abs_diff=totals["mean_abs_diff"],
        max_abs_diff=totals["max_abs_diff"],
        worst=totals["worst"],
        tokens_per_second=fast.tokens_per_second,
        seconds_per_step=fast.seconds_per_step,
        warm_up=fast.warm_up,
        tokens_sha256=held,
        seal_sha256=sha256_file(run / SEAL),
    )


def tokens_digest(run: Path, steps: int) -> str:
    """The sha256 over which samples a run holds and all their token ids, in order."""
    digest = hashlib.sha256()
    for step in range(1, steps + 1):
        tensors = read_tensors(run / sidecar_name(step))
        for name in _IDENTITY:
            digest.update(tensors[name].data)
    return digest.hexdigest()


def collect(folder: Path, plan: Mapping[str, Any], reasons: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """ablation.json as data, from the arms' folders. `reasons` holds what stopped an arm, by (view, arm)."""
    views: dict[str, list[dict[str, Any]]] = {}
    tokens: str | None = None
    for view in plan["views"]:
        rows = []
        for arm in plan["arms"]:
            wanted = tokens if view == "equal" else None
            row = row_of(arm, folder / view / arm, reasons.get((view, arm)), wanted)
            if view == "free" and arm == plan["tokens_of"]:
                tokens = row.tokens_sha256
            rows.append(asdict(row))
        views[view] = rows
    return {
        "schema": SCHEMA,
        "plan": dict(plan),
        "tokens_of": plan["tokens_of"],
        "verdict": judge(views).value,
        "views": views,
    }


def judge(views: Mapping[str, Sequence[Mapping[str, Any]]]) -> Verdict:
    """same: each arm proves its route, and fully strict arms have the same bits. Native arms may differ."""
    rows = [row for view in views.values() for row in view]
    if not rows or any(row["status"] == Verdict.CANNOT_TELL.value for row in rows):
        return Verdict.CANNOT_TELL
    strict = [row for row in rows if set(row["cases"].values()) == {"R/R"}]
    return Verdict.DIFFERENT if any(row["status"] != Verdict.SAME.value for row in strict) else Verdict.SAME


HEAD = (
    "arm", "attention", "ffn", "logp", "status", "mean abs dlogp", "max abs dlogp", "mismatch_count",
    "compared tokens", "tokens/s",
)  # fmt: skip


def cells(row: Mapping[str, Any]) -> list[str]:
    """The row as the table's texts; a value that does not exist shows as a dash."""
    return [
        row["arm"],
        *(row["cases"][module] for module in MODULES),
        row["status"],
        _number(row["mean_abs_diff"]),
        _number(row["max_abs_diff"]),
        _whole(row["mismatch_count"]),
        _whole(row["compared_tokens"]),
        "-" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.0f}",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.3g}"


def _whole(value: int | None) -> str:
    return "-" if value is None else str(value)


def as_markdown(ablation: Mapping[str, Any]) -> str:
    """ablation.md: one table per view, and what each needs to be read right."""
    lines = ["# Module ablation", ""]
    lines += [f"Verdict: **{ablation['verdict']}**. Each case is trainer/rollout: R the samebits route, P native.", ""]
    for view, rows in ablation["views"].items():
        lines += [f"## {TITLES[view]}", ""]
        if view == "equal":
            lines += [f"Tokens of {ablation['tokens_of']}, forced through both engines of every arm.", ""]
        lines += [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"]
        lines += [f"| {' | '.join(cells(row))} |" for row in rows]
        lines += ["", *notes(rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What stands under a table: steps left out of the speed, and why an arm cannot tell."""
    skipped = sorted({row["warm_up"] for row in rows if row["warm_up"] is not None})
    found = [f"tokens/s without the first {'/'.join(map(str, skipped))} step(s) of each arm."] if skipped else []
    return found + [f"{row['arm']} cannot tell: {row['problem']}" for row in rows if row["problem"]]
