"""`samebits ablate`: from flags to a table, or to one paragraph that says why not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from samebits.ablate.arms import arms_of, parse_arm
from samebits.ablate.plan import Plan, make_plan
from samebits.ablate.table import ABLATION, ABLATION_TEXT
from samebits.cli.run import INTERRUPTED, prepare, reason_of
from samebits.evidence.record import Watcher
from samebits.evidence.verdict import Verdict
from samebits.report.ablation import write_ablation_report
from samebits.report.terminal import print_views
from samebits.rl.config import RunConfig
from samebits.rl.inputs import resolve_inputs
from samebits.rl.loggers import check_loggers, loggers
from samebits.rl.protocols import RunFailed
from samebits.timeline.events import Event


def ablate_command(
    flags: Mapping[str, Any],
    file: Path | None,
    folder: Path,
    named: Sequence[str],
    modules: Sequence[str],
    view: str,
    source: str | None,
    debug: bool,
) -> int:
    """Runs all arms and returns the exit code."""
    try:
        chosen = parse_arm(source) if source else None
        plan = make_plan(flags, file, arms=arms_of(named, modules), view=view, source=chosen, folder=folder)
        ablation = _run(plan)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; the same command goes on with the arms that {folder} lacks", err=True)
        return INTERRUPTED
    except (ValueError, RunFailed, OSError) as error:
        if debug:
            raise
        typer.echo(f"error: {reason_of(error)}", err=True)
        return Verdict.CANNOT_TELL.exit_code
    print_views(ablation["views"], Console(highlight=False))
    typer.echo(f"report: {write_ablation_report(folder)}")
    typer.echo(f"verdict: {ablation['verdict']}\ntable: {folder / ABLATION_TEXT} and {folder / ABLATION}")
    return Verdict(ablation["verdict"]).exit_code


def _run(plan: Plan) -> dict[str, Any]:
    # Bad input is named before torch is loaded for those who have to read the error.
    inputs = resolve_inputs(plan.config)
    check_loggers(plan.config)
    from samebits.ablate.run import run_ablation
    from samebits.cli.wiring import parts

    prepare()
    return run_ablation(plan, inputs, parts(), _watching, lambda line: typer.echo(line, err=True))


@contextmanager
def _watching(config: RunConfig) -> Iterator[Watcher]:
    """The loggers of the settings, and a live bar per arm on a terminal; elsewhere one line per arm is enough."""
    from samebits.cli.progress import Watch

    with ExitStack() as stack:
        watchers = [stack.enter_context(loggers(config))]
        if Console(stderr=True).is_terminal:
            watchers.append(stack.enter_context(Watch()))

        def watch(event: Event) -> None:
            for one in watchers:
                one(event)

        yield watch
