"""`samebits run`: one job from flags to a verdict, or to one paragraph that says why not."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from samebits import env
from samebits.evidence.store import MODEL, SEAL, TIMELINE
from samebits.evidence.verdict import Verdict
from samebits.evidence.verify import Verification, verify
from samebits.rl.config import RunConfig, load_config, to_toml
from samebits.rl.inputs import resolve_inputs
from samebits.rl.loggers import check_loggers, loggers
from samebits.rl.protocols import RunFailed
from samebits.timeline.events import Event

INTERRUPTED = 130
_ENDING_SECONDS = 10.0


def run_command(
    flags: Mapping[str, Any],
    file: Path | None,
    print_config: str | None,
    debug: bool,
    matrix: Path | None = None,
    matrix_dir: Path | None = None,
) -> int:
    """Runs one job, or a matrix of layouts, and returns the exit code."""
    config = None
    try:
        if matrix is not None:
            if file is not None or print_config is not None:
                raise ValueError("matrix: its file holds all settings of the job; leave out config and print_config")
            return _run_matrix(matrix, matrix_dir, flags)
        if matrix_dir is not None:
            raise ValueError("matrix_dir: there is no matrix; give its file with --matrix")
        config = load_config(flags, file)
        if print_config is not None:
            typer.echo(_printed(config, print_config))
            return 0
        with ExitStack() as stack:
            if config.run_dir is None:
                run_dir = stack.enter_context(numbered_run_dir(Path("runs")))
                config = config.model_copy(update={"run_dir": str(run_dir)})
            return _run(config)
    except KeyboardInterrupt:
        typer.echo(f"interrupted{_kept(config)}", err=True)
        return INTERRUPTED
    except FileExistsError as error:
        typer.echo(f"error: {error}", err=True)
    except (ValueError, RunFailed, OSError) as error:
        if debug:
            raise
        typer.echo(f"error: {reason_of(error)}{_kept(config)}", err=True)
    return Verdict.CANNOT_TELL.exit_code


@contextmanager
def numbered_run_dir(folder: Path) -> Iterator[Path]:
    """Makes the first of folder/0001, folder/0002, ... after all that exist, so that no other run takes it. Removed at
    the end where nothing came into it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = None
    while path is None:
        taken = [int(path.name) for path in folder.glob("[0-9]*") if path.name.isdecimal()]
        path = folder / f"{max(taken, default=0) + 1:04d}"
        try:
            path.mkdir()
        except FileExistsError:  # another run was faster
            path = None
    try:
        yield path
    finally:
        with suppress(OSError):
            path.rmdir()
            folder.rmdir()


def reason_of(error: Exception) -> str:
    """What went wrong, without Python's error number."""
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ", while the run was being recorded"
        return f"{error.strerror}{where}"
    return str(error)


def _kept(config: RunConfig | None) -> str:
    """Where the records of a run that broke off can be read, if it had begun."""
    run = Path(config.run_dir) if config and config.run_dir else None
    if run is None or not (run / TIMELINE).is_file() or (run / SEAL).is_file():
        return ""
    return f"\nWhat was recorded until then is in {run}; the run is not sealed."


def _printed(config: RunConfig, form: str) -> str:
    if form == "toml":
        return to_toml(config).rstrip()
    if form == "json":
        return config.model_dump_json(indent=2)
    raise ValueError(f"print_config: want toml or json, got {form!r}")


def _run(config: RunConfig) -> int:
    # Bad input is named before torch is loaded for those who have to read the error.
    resolve_inputs(config)
    check_loggers(config)
    from samebits.cli.progress import Watch
    from samebits.cli.wiring import parts
    from samebits.report import write_report
    from samebits.rl.job import run_job

    prepare()
    with Watch() as watch, loggers(config) as log:

        def both(event: Event) -> None:
            watch(event)
            log(event)

        run_job(config, parts(), both)
    run = Path(str(config.run_dir))
    found = verify(run)
    typer.echo(conclusion(config, found))
    if config.save_model:
        typer.echo(f"model: {run / MODEL}")
    try:
        typer.echo(f"report: {write_report(run, found)}")
    except OSError as error:
        # The run is sealed and its verdict stands; a page can be rendered later.
        typer.echo(f"no report: {reason_of(error)}", err=True)
    return found.verdict.exit_code


def _run_matrix(file: Path, folder: Path | None, flags: Mapping[str, Any]) -> int:
    from samebits.cli.matrix import matrix_command

    prepare()
    return matrix_command(file, folder, flags)


def prepare() -> None:
    """Signals end a run in good order, and killed processes are cleared away in silence."""
    interrupt = Interrupt()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    # A killed process leaves semaphores behind; Python's tracker removes them, and need not say so here.
    env.export({"PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker"})


class Interrupt:
    """A signal handler: the first signal raises KeyboardInterrupt, those of the next seconds don't disturb the end that
    it began. Later ones raise again, should it have been lost."""

    def __init__(self) -> None:
        self._quiet_until = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + _ENDING_SECONDS
            raise KeyboardInterrupt


def conclusion(config: RunConfig, found: Verification) -> str:
    """The verdict of a finished run in plain words, and the numbers behind it."""
    totals = found.totals
    tokens, wrong = totals.get("compared_tokens", 0), totals.get("mismatch_count", 0)
    words = {
        Verdict.SAME: f"all {tokens} compared log-probabilities have the same bits on both sides",
        Verdict.DIFFERENT: (
            f"{wrong} of {tokens} compared log-probabilities differ, in {totals.get('steps_with_mismatch')} "
            f"of {totals.get('steps')} steps; the largest difference is {totals.get('max_abs_diff'):.3g}"
        ),
        Verdict.CANNOT_TELL: f"cannot tell: {'; '.join(found.problems)}",
    }
    lines = [f"case {totals.get('case')}: {found.verdict.value}: {words[found.verdict]}"]
    if found.verdict is Verdict.DIFFERENT and set(config.cases.values()) != {"R/R"}:
        lines.append("native code is part of this case: this mismatch is what R/R removes")
    for name in ("mismatch_count", "max_abs_diff", "mean_abs_diff", "compared_tokens"):
        lines.append(f"  {name}: {totals.get(name)}")
    lines.append(f"  tokens_per_second: {totals.get('tokens_per_second', 0.0):.1f}")
    lines.append(f"  seconds_per_step: {totals.get('seconds_per_step', 0.0):.3f}")
    return "\n".join(lines)
