"""Recomputing a run's verdict from its directory. Standard library only, and nothing in the directory is trusted.

The timeline is read first, so that totals can be shown whatever is wrong. Then: seal, manifest, every listed file, the
timeline's rules, each step's sidecar against its lines, the route records, the summary. The first fault found makes the
answer "cannot tell" and is the one that is named.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from samebits.evidence.compare import compare
from samebits.evidence.declared import check_declared, check_processes, vocabulary
from samebits.evidence.drift import agrees, drift
from samebits.evidence.routes import check_routes
from samebits.evidence.samples import sample_problem
from samebits.evidence.sidecar import StepSample, read_step, sidecar_name
from samebits.evidence.store import (
    MANIFEST,
    MANIFEST_SCHEMA,
    MODEL,
    ROUTES,
    SEAL,
    SEAL_SCHEMA,
    STEPS,
    SUMMARY,
    TIMELINE,
    TRACES,
    WATCHED,
    sealed_files,
    sha256_file,
)
from samebits.evidence.summary import summarise
from samebits.evidence.support import Limits
from samebits.evidence.verdict import Verdict
from samebits.timeline.events import Compared, Event, Measured, RunStarted, Sampled, parse_json
from samebits.timeline.ledger import read
from samebits.timeline.rules import check

# More than any honest record needs, and little enough to be read.
MAX_JSON = 16 << 20
MAX_FILE = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The verdict, the faults found (empty unless "cannot tell"), and the totals recomputed so far.

    `sampling` says what limited the draws, and what the recorded supports hold; empty when nothing did.
    """

    verdict: Verdict
    problems: tuple[str, ...] = ()
    totals: Mapping[str, Any] = field(default_factory=dict)
    sampling: str = ""


class _Fault(ValueError):
    """A sentence about what is wrong with the directory."""


def verify(run: Path) -> Verification:
    """Verifies one run directory. Never raises for what lies in it; OSError becomes a fault as well."""
    events: tuple[Event, ...] = ()
    try:
        if not run.is_dir():
            raise _Fault(f"{run} is not a directory")
        check_timeline(run)
        timeline = read(run / TIMELINE)
        events = timeline.events
        manifest = _sealed_manifest(run)
        _check_files(run, manifest)
        problems = [timeline.problem] if timeline.problem else check(events)
        if problems:
            raise _Fault(f"{TIMELINE} {problems[0]}")
        check_declared(manifest, events)
        _check_unchanged(manifest)
        _check_model(run, manifest)
        clip, limits = _clip_ratio(manifest), Limits.of(manifest["config"])
        strict = _started(events).case["logp"].endswith("/R")
        for step in _steps(run, events):
            _check_step(step.samples, step.compared, step.lines)
            _check_drift(step, clip)
            problem = limits.problem(step.samples) or sample_problem(step.samples, vocabulary(manifest), strict)
            if problem:
                raise _Fault(f"{step.compared.sidecar}: {problem}")
        _check_step_files(run, manifest, events)
        _check_route_files(run, manifest, events)
        summary = load_object(run, SUMMARY)
        wanted = summarise(events)
        for key in sorted(wanted.keys() | summary.keys()):
            if wanted.get(key) != summary.get(key):
                raise _Fault(f"{SUMMARY}: {key} is {summary.get(key)!r}, the records give {wanted.get(key)!r}")
    except (ValueError, OSError, ArithmeticError) as fault:
        return Verification(verdict=Verdict.CANNOT_TELL, problems=(str(fault),), totals=_readable(events))
    return _conclude(wanted, limits.describe())


def _readable(events: tuple[Event, ...]) -> dict[str, Any]:
    """What lines that nothing vouches for add up to; nothing where there are none, or their numbers have no sum."""
    try:
        totals = summarise(events) if events else {}
        json.dumps(totals, allow_nan=False)
    except (ValueError, ArithmeticError):
        return {}
    return totals


def check_timeline(run: Path) -> None:
    """Raises ValueError when a directory holds no timeline, or one that should not be read: a link, or too large."""
    path = run / TIMELINE
    if not path.is_file():
        raise _Fault(f"{run} holds no run: {TIMELINE} is missing")
    if path.is_symlink():
        raise _Fault(f"{TIMELINE} is a symbolic link")
    if path.stat().st_size > MAX_FILE:
        raise _Fault(f"{TIMELINE} is larger than {MAX_FILE} bytes")


def _conclude(totals: Mapping[str, Any], sampling: str) -> Verification:
    verdict = Verdict(totals["verdict"])
    problems = () if verdict is not Verdict.CANNOT_TELL else ("nothing comparable: no token, or no finite value",)
    return Verification(verdict=verdict, problems=problems, totals=totals, sampling=sampling)


def load_object(run: Path, name: str) -> dict[str, Any]:
    """A JSON object of a directory that nobody vouches for. Raises ValueError that names what is wrong with it."""
    path = run / name
    if path.is_symlink() or not path.is_file():
        raise _Fault(f"{name} is missing")
    if path.stat().st_size > MAX_JSON:
        raise _Fault(f"{name} is larger than {MAX_JSON} bytes")
    try:
        record = parse_json(path.read_bytes())
    except ValueError as error:
        raise _Fault(f"{name} is not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise _Fault(f"{name} is not a JSON object")
    return record


def _sealed_manifest(run: Path) -> dict[str, Any]:
    if not (run / SEAL).exists():
        raise _Fault(f"not sealed: {SEAL} is missing, so the run did not come to its end")
    seal = load_object(run, SEAL)
    manifest = load_object(run, MANIFEST)
    if seal.get("schema") != SEAL_SCHEMA:
        raise _Fault(f"{SEAL}: schema is {seal.get('schema')!r}, want {SEAL_SCHEMA!r}")
    if seal.get("manifest_sha256") != hashlib.sha256((run / MANIFEST).read_bytes()).hexdigest():
        raise _Fault(f"{MANIFEST} is not the one that was sealed")
    if manifest.get("schema") != MANIFEST_SCHEMA:
        raise _Fault(f"{MANIFEST}: schema is {manifest.get('schema')!r}, want {MANIFEST_SCHEMA!r}")
    return manifest


def _check_files(run: Path, manifest: Mapping[str, Any]) -> None:
    listed: set[str] = set()
    entries = manifest.get("files")
    if not isinstance(entries, list):
        raise _Fault(f"{MANIFEST}: files is not a list")
    for entry in entries:
        name, size, digest = _file_entry(entry)
        if name in listed:
            raise _Fault(f"{MANIFEST} lists {name} twice")
        listed.add(name)
        path = run / name
        if any(part.is_symlink() for part in (path, *path.parents) if part != run and run in part.parents):
            raise _Fault(f"{name} is a symbolic link")
        if not path.is_file():
            raise _Fault(f"{name} is missing")
        if size > MAX_FILE:
            raise _Fault(f"{name} is larger than {MAX_FILE} bytes")
        if path.stat().st_size != size or sha256_file(path) != digest:
            raise _Fault(f"{name} was changed after it was sealed")
    strangers = sorted(set(sealed_files(run)) - listed)
    if strangers:
        raise _Fault(f"{strangers[0]} is not listed in {MANIFEST}")
    for name in (TIMELINE, SUMMARY):
        if name not in listed:
            raise _Fault(f"{MANIFEST} does not list {name}")


def _file_entry(entry: object) -> tuple[str, int, str]:
    if not isinstance(entry, dict) or set(entry) != {"path", "bytes", "sha256"}:
        raise _Fault(f"{MANIFEST}: a file needs path, bytes and sha256, got {entry!r}")
    name, size, digest = entry["path"], entry["bytes"], entry["sha256"]
    if not isinstance(name, str) or type(size) is not int or not isinstance(digest, str):
        raise _Fault(f"{MANIFEST}: a file's path, bytes or sha256 has the wrong type: {entry!r}")
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or pure.as_posix() != name or "\0" in name:
        raise _Fault(f"{MANIFEST}: path {name!r} leaves the run directory or is not plain")
    return name, size, digest


def _check_unchanged(manifest: Mapping[str, Any]) -> None:
    """What the run read and ran on was the same at its end as at its start."""
    after = manifest.get("after")
    if not isinstance(after, dict):
        raise _Fault(f"{MANIFEST}: after is missing: nothing shows that the inputs did not change during the run")
    for name in WATCHED:
        if name not in manifest or manifest[name] != after.get(name):
            raise _Fault(f"{MANIFEST}: {name} changed during the run, or was not recorded at both ends")


def _check_model(run: Path, manifest: Mapping[str, Any]) -> None:
    """The trained model, where it was kept and still lies here, is the one that was saved."""
    if not (run / MODEL).exists():
        return
    saved = manifest.get("saved")
    if saved is None:
        raise _Fault(f"{MODEL} lies here, but the run saved no model")
    strangers = {path.name for path in (run / MODEL).iterdir()} - saved["files"].keys()
    if strangers:
        raise _Fault(f"{MODEL}/{min(strangers)} was not saved by the run; move it or the whole folder away")
    for name, digest in saved["files"].items():
        path = run / MODEL / name
        if Path(name).name != name or not path.is_file() or sha256_file(path) != digest:
            raise _Fault(f"{MODEL}/{name} is missing, or not the file that was saved")


def _started(events: tuple[Event, ...]) -> RunStarted:
    started = events[0]
    assert isinstance(started, RunStarted)
    return started


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The sidecar's samples, the lines that claim what they give, and the samples' own lines."""

    samples: list[StepSample]
    compared: Compared
    measured: Measured
    lines: list[Sampled]


def _steps(run: Path, events: tuple[Event, ...]) -> Iterator[_Step]:
    lines: list[Sampled] = []
    compared: Compared | None = None
    for event in events:
        if isinstance(event, Sampled):
            lines.append(event)
        if isinstance(event, Compared):
            compared = event
        if isinstance(event, Measured) and compared is not None:
            if compared.sidecar != sidecar_name(event.step):
                raise _Fault(f"step {event.step}: its sidecar is named {compared.sidecar!r}")
            path = run / compared.sidecar
            if not path.is_file() or sha256_file(path) != compared.sidecar_sha256:
                raise _Fault(f"{compared.sidecar} is not the file that the timeline recorded")
            yield _Step(samples=read_step(path), compared=compared, measured=event, lines=lines)
            lines = []


def _clip_ratio(manifest: Mapping[str, Any]) -> float:
    clip = manifest["config"].get("clip_ratio")
    if type(clip) not in (float, int) or not 0 < clip < 1:
        raise _Fault(f"{MANIFEST}: config.clip_ratio is {clip!r}")
    return float(clip)


def _check_drift(step: _Step, clip: float) -> None:
    measured = ((sample.rollout_bits, sample.trainer_bits, sample.advantage) for sample in step.samples)
    tokens, found = drift(measured, clip)
    wrong = agrees(step.measured.metrics, found)
    if tokens != step.measured.tokens or wrong is not None:
        claimed = step.measured.metrics.get(wrong) if wrong else step.measured.tokens
        actual = found.get(wrong) if wrong else tokens
        raise _Fault(f"{step.compared.sidecar}: {wrong or 'tokens'} is {actual!r}, the timeline claims {claimed!r}")


def _check_step(samples: list[StepSample], compared: Compared, lines: list[Sampled]) -> None:
    where = compared.sidecar
    if [sample.key for sample in samples] != [line.key for line in lines]:
        raise _Fault(f"{where}: its samples are not those of the timeline")
    start = 0
    for sample, line in zip(samples, lines, strict=True):
        span = (start, len(sample.prompt_ids), len(sample.token_ids))
        if span != (line.start, line.prompt_length, line.response_length):
            raise _Fault(f"{where}: sample {sample.key} spans {span}, the timeline says otherwise")
        if any(version != line.version for version in sample.versions):
            raise _Fault(f"{where}: a token of sample {sample.key} is not of weight version {line.version}")
        if (sample.reward, sample.advantage) != (line.reward, line.advantage):
            raise _Fault(f"{where}: reward or advantage of sample {sample.key} differs from the timeline")
        start += len(sample.prompt_ids) + len(sample.token_ids)
    found = compare((sample.key, sample.rollout_bits, sample.trainer_bits) for sample in samples)
    for name in ("compared_tokens", "mismatch_count", "nonfinite_count", "max_abs_diff", "mean_abs_diff"):
        claimed, actual = getattr(compared, name), getattr(found, name)
        if claimed != actual or not math.isfinite(claimed):
            raise _Fault(f"{where}: {name} is {actual!r}, the timeline claims {claimed!r}")
    if compared.worst != (str(found.worst) if found.worst else None):
        raise _Fault(f"{where}: the worst token is {found.worst}, the timeline claims {compared.worst}")


def _check_step_files(run: Path, manifest: Mapping[str, Any], events: tuple[Event, ...]) -> None:
    """One sidecar for each step, one file of traces where they were asked for, and no others."""
    wanted = {event.sidecar for event in events if isinstance(event, Compared)}
    if manifest["config"].get("trace_tokens"):
        wanted |= {name.replace(STEPS, TRACES, 1) for name in wanted}
    found = {name for name in sealed_files(run) if name.split("/")[0] in (STEPS, TRACES)}
    for name in sorted(wanted ^ found):
        raise _Fault(f"{name} is missing" if name in wanted else f"{name} belongs to no step of this run")


def _check_route_files(run: Path, manifest: Mapping[str, Any], events: tuple[Event, ...]) -> None:
    started = _started(events)
    names = [name for name in sealed_files(run) if name.startswith(f"{ROUTES}/")]
    records = [load_object(run, name) for name in names]
    workers = manifest["config"].get("rollout_tp")
    if type(workers) is not int:
        raise _Fault(f"{MANIFEST}: config.rollout_tp is {workers!r}")
    problems = check_routes(
        records, started.case, started.contract, started.trainer_ranks, started.rollout_engines, workers
    )
    if problems:
        raise _Fault(problems[0])
    check_processes(manifest, records, events)


def describe(verification: Verification) -> str:
    """The verification in a few plain lines."""
    totals = verification.totals
    lines = [f"verdict: {verification.verdict.value}"]
    lines += [f"problem: {problem}" for problem in verification.problems]
    names = ("case", "steps", "compared_tokens", "mismatch_count", "max_abs_diff", "mean_abs_diff", "worst")
    lines += [f"{name}: {totals[name]}" for name in names if totals.get(name) is not None]
    lines += [f"sampling: {verification.sampling}"] if verification.sampling else []
    return "\n".join(lines)


def to_json(verification: Verification) -> str:
    """The verification as one JSON object."""
    return json.dumps(
        {
            "verdict": verification.verdict.value,
            "problems": list(verification.problems),
            "totals": dict(verification.totals),
            "sampling": verification.sampling,
        },
        allow_nan=False,
    )


def main(arguments: list[str]) -> int:
    """`python -m samebits.evidence.verify RUN`: the same answer where nothing but Python is installed."""
    if len(arguments) != 1:
        print("usage: python -m samebits.evidence.verify RUN", file=sys.stderr)
        return Verdict.CANNOT_TELL.exit_code
    found = verify(Path(arguments[0]))
    print(describe(found))
    return found.verdict.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
