"""Make the Triton kernels wrong on purpose, and count which conformance cases notice, on a machine with a GPU.

`python -m samebits.testing.sabotage_gpu [--definitions FOLDER] [--processes N]` (in a checkout) prints `caught N of N`
and fails below N. Each fault gets a copy of the package of its own; a copy without a fault must see no difference.
FOLDER keeps what the definitions give (samebits.testing.definitions), so that it need not be computed again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from samebits.testing.faults import Fault, with_fault
from samebits.testing.faults_gpu import FAULTS

SOURCES = Path(__file__).resolve().parents[2]
Job = tuple[str, str]  # an op and an arithmetic
LONGEST = 900.0  # seconds for the cases of one op


@dataclass(frozen=True)
class Finding:
    """The cases that see a difference, those that the kernels refuse, and how many ran."""

    noticed: list[str]
    refused: list[str]
    cases: int

    def __str__(self) -> str:
        return f"{len(self.noticed)} of {self.cases} differ, {len(self.refused)} refused {' '.join(self.noticed)}"


@dataclass(frozen=True)
class Inspector:
    """Runs the cases of an op in processes that see a copy of the package under `folder`."""

    folder: Path
    definitions: Path

    def package(self, name: str, fault: Fault | None = None) -> Path:
        """A copy of the sources, with the fault. ValueError where a kernel no longer holds the text it replaces."""
        copy = self.folder / name
        shutil.copytree(SOURCES / "samebits", copy / "samebits", ignore=shutil.ignore_patterns("__pycache__", "csrc"))
        if fault is not None:
            path = copy / "samebits" / fault.file
            path.write_text(with_fault(path.read_text(), fault))
        return copy

    def look(self, package: Path, op: str, arithmetic: str, enough: int) -> Finding:
        """RuntimeError where the cases could not run."""
        words = ("-m", "samebits.testing.check_kernels", op, arithmetic, self.definitions, enough)
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST, cwd=package)
        if done.returncode != 0:
            raise RuntimeError(f"{op} under {arithmetic} could not run:\n{done.stderr[-2000:]}")
        result = json.loads(done.stdout.splitlines()[-1])
        if not Path(result["package"]).is_relative_to(package):
            raise RuntimeError(f"{op}: the process took {result['package']} instead of the copy in {package}")
        return Finding(result["noticed"], result["refused"], result["cases"])


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m samebits.testing.sabotage_gpu", description=__doc__)
    parser.add_argument("--definitions", type=Path, help="where what the definitions give is kept between runs")
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1))
    asked = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("sabotage_gpu: there is no CUDA device here to run the kernels on", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(asked.processes) as pool:
        definitions = asked.definitions or Path(name) / "definitions"
        return _inspect(Inspector(Path(name), definitions.resolve()), pool)


def _inspect(inspector: Inspector, pool: ThreadPoolExecutor) -> int:
    """Look at every fault, and at the kernels as they are: a line each as it comes, then the count."""
    clean = inspector.package("clean")
    jobs = sorted({(fault.op, fault.arithmetic) for fault in FAULTS})
    waiting: dict[Future[Finding], Job | Fault] = {
        **{pool.submit(inspector.look, clean, *job, sys.maxsize): job for job in jobs},
        **{pool.submit(_look, inspector, number): fault for number, fault in enumerate(FAULTS)},
    }
    findings: dict[Job | Fault, Finding] = {}
    for done in as_completed(waiting):
        which = waiting[done]
        try:
            findings[which] = done.result()
            print(f"{findings[which]}  {which if isinstance(which, Fault) else f'no fault in {which}'}", flush=True)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"could not look at {which}: {error}", flush=True)
    trusted = all(job in findings and not findings[job].noticed for job in jobs)
    if not trusted:
        print("the suite is not to be trusted: without a fault a case differs or did not run")
    missed = [fault for fault in FAULTS if not is_caught(findings, fault)]
    for fault in missed:
        print(f"MISSED  {fault}")
    print(f"caught {len(FAULTS) - len(missed)} of {len(FAULTS)}")
    return 0 if trusted and not missed else 1


def is_caught(findings: Mapping[Job | Fault, Finding], fault: Fault) -> bool:
    """A case differs; or a kernel refuses what it serves without the fault, so it is not wrong in silence."""
    found, clean = findings.get(fault), findings.get((fault.op, fault.arithmetic))
    if found is None or clean is None:
        return False
    return bool(found.noticed or set(found.refused) - set(clean.refused))


def _look(inspector: Inspector, number: int) -> Finding:
    fault = FAULTS[number]
    return inspector.look(inspector.package(f"fault{number}", fault), fault.op, fault.arithmetic, 1)


if __name__ == "__main__":
    sys.exit(main())
