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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from samebits.testing.faults import Fault, with_fault
from samebits.testing.faults_gpu import FAULTS

SOURCES = Path(__file__).resolve().parents[2]
LONGEST = 900.0  # seconds for the cases of one op


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

    def differing(self, package: Path, op: str, arithmetic: str, enough: int) -> tuple[list[str], int]:
        """(names of the cases that notice, number of cases that ran); RuntimeError where they could not run."""
        words = ("-m", "samebits.testing.check_kernels", op, arithmetic, self.definitions, enough)
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST, cwd=package)
        if done.returncode != 0:
            raise RuntimeError(f"{op} under {arithmetic} could not run:\n{done.stderr[-2000:]}")
        result = json.loads(done.stdout.splitlines()[-1])
        if not Path(result["package"]).is_relative_to(package):
            raise RuntimeError(f"{op}: the process took {result['package']} instead of the copy in {package}")
        return result["noticed"], result["cases"]


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
    """Look at every fault, and at the kernels as they are; a line each, as they come."""
    clean = inspector.package("clean")
    jobs = sorted({(fault.op, fault.arithmetic) for fault in FAULTS})
    untouched = {pool.submit(inspector.differing, clean, *job, sys.maxsize): job for job in jobs}
    seeded = {pool.submit(_look, inspector, number): fault for number, fault in enumerate(FAULTS)}
    caught = wrong = 0
    for done in as_completed([*untouched, *seeded]):
        try:
            differ, ran = done.result()
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"NOT RUN  {untouched.get(done) or seeded[done]}: {error}", flush=True)
            wrong += 1
            continue
        if done in untouched:
            op, arithmetic = untouched[done]
            wrong += bool(differ)
            print(
                f"without any fault {len(differ)} of {ran} cases of {op} under {arithmetic} differ", *differ, flush=True
            )
        else:
            caught += bool(differ)
            print(f"{'caught' if differ else 'MISSED'} after {ran:2d} cases  {seeded[done]}", *differ, flush=True)
    print(f"caught {caught} of {len(FAULTS)}")
    if wrong:
        print("the suite is not to be trusted: see what differs without a fault, or did not run")
    return 0 if caught == len(FAULTS) and not wrong else 1


def _look(inspector: Inspector, number: int) -> tuple[list[str], int]:
    fault = FAULTS[number]
    return inspector.differing(inspector.package(f"fault{number}", fault), fault.op, fault.arithmetic, 1)


if __name__ == "__main__":
    sys.exit(main())
