"""Running an ablation arm by arm. Started again, it keeps finished arms after verifying them and runs the others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from samebits.ablate.arms import Arm
from samebits.ablate.plan import EQUAL, FREE, PLACES, Plan, open_folder
from samebits.ablate.table import ABLATION, ABLATION_TEXT, Row, as_markdown, collect, row_of
from samebits.evidence.record import Watcher
from samebits.evidence.store import MANIFEST, SEAL, json_bytes, write_whole
from samebits.evidence.verify import verify
from samebits.rl.config import RunConfig
from samebits.rl.inputs import Inputs
from samebits.rl.job import Parts, check_job, run_job
from samebits.rl.protocols import RunFailed
from samebits.timeline.events import parse_json

# who watches an arm, by its settings
Watching = Callable[[RunConfig], AbstractContextManager[Watcher]]


def run_ablation(
    plan: Plan, inputs: Inputs, parts: Parts, watching: Watching, say: Callable[[str], None]
) -> dict[str, Any]:
    """All arms in all views, then ablation.json and ablation.md. Returns what ablation.json holds.

    An arm that fails shows in the table and does not stop the others. Raises ValueError for a job that no arm can run
    (nothing was written), for a folder with another plan or with an arm whose records do not hold, OSError when the
    disk refuses something.
    """
    _check_arms(plan, parts)
    data = plan.as_data(inputs, parts.contract(plan.config, inputs))
    if open_folder(plan, data):
        say(f"{plan.folder} holds this ablation: finished arms are verified and kept")
    reasons: dict[tuple[str, str], str] = {}
    work = [(view, arm) for view in plan.views for arm in _ordered(plan, view)]
    for number, (view, arm) in enumerate(work, start=1):
        label = f"{number}/{len(work)} {view} {arm.name}"
        if _finished(plan, view, arm):
            say(f"{label}: kept")
            continue
        reason = _run_arm(plan, view, arm, parts, watching)
        if reason is not None:
            reasons[view, arm.name] = reason
        say(f"{label}: {_brief(row_of(arm.name, plan.path(view, arm), reason))}")
    ablation = collect(plan.folder, data, reasons)
    write_whole(plan.folder / ABLATION, json_bytes(ablation))
    write_whole(plan.folder / ABLATION_TEXT, as_markdown(ablation).encode())
    return ablation


def _check_arms(plan: Plan, parts: Parts) -> None:
    """Raises ValueError when every arm is refused before it starts, with the reason of the first."""
    reasons = []
    for arm in _ordered(plan, FREE):
        try:
            return check_job(plan.config_of(FREE, arm), parts)
        except ValueError as error:
            reasons.append(error)
    raise reasons[0]


def _ordered(plan: Plan, view: str) -> list[Arm]:
    """The arm whose tokens are replayed comes first, so that a broken plan shows itself early."""
    return sorted(plan.arms, key=lambda arm: arm != plan.source) if view == FREE else list(plan.arms)


def _finished(plan: Plan, view: str, arm: Arm) -> bool:
    """Whether the arm's sealed records are there, hold, and belong to this plan. What broke off is removed."""
    run = plan.path(view, arm)
    if not (run / SEAL).is_file():
        shutil.rmtree(run, ignore_errors=True)
        return False
    found = verify(run)
    if found.problems:
        raise ValueError(f"{run}: a finished arm's records do not hold: {found.problems[0]}. Remove it to run it again")
    config = parse_json((run / MANIFEST).read_bytes())["config"]
    wanted = plan.config_of(view, arm).model_dump()
    for key in wanted.keys() - set(PLACES):
        if config.get(key) != wanted[key]:
            raise ValueError(f"{run}: {key} is {config.get(key)!r}, this plan wants {wanted[key]!r}; remove the arm")
    return True


def _run_arm(plan: Plan, view: str, arm: Arm, parts: Parts, watching: Watching) -> str | None:
    """Runs one arm; what stopped it, if something did."""
    if view == EQUAL and not (plan.path(FREE, plan.source) / SEAL).is_file():
        return f"there are no recorded tokens: {plan.source.name} did not come to its end"
    config = plan.config_of(view, arm)
    try:
        with watching(config) as watch:
            run_job(config, parts, watch)
    except (RunFailed, ValueError) as error:
        return str(error)
    return None


def _brief(row: Row) -> str:
    if row.problem is not None:
        return f"{row.status}: {row.problem}"
    return (
        f"{row.status}, mismatch_count {row.mismatch_count} of {row.compared_tokens}, "
        f"{row.tokens_per_second:.0f} tokens/s, {row.seconds_per_step:.2f} s a step"
    )
