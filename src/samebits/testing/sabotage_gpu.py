"""Make the Triton kernels wrong on purpose, and count which conformance cases notice, on a machine with a GPU.

`python -m samebits.testing.sabotage_gpu [--memory DIR] [--processes N]` (in a checkout) prints `caught N of N` and
fails below N. Each fault gets a copy of the package of its own; a copy without a fault comes first. DIR keeps what
the definitions give, so that a second run need not compute it again.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from samebits.testing.faults import Fault, with_fault
from samebits.testing.faults_gpu import FAULTS

SOURCES = Path(__file__).resolve().parents[2]
LONGEST = 300.0  # seconds for the cases of one op


@dataclass(frozen=True)
class Inspector:
    """Runs the cases of an op in processes that see a copy of the package under `folder`."""

    folder: Path
    memory: Path

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
        memory = self.memory / f"{op}.{arithmetic}.json"
        words = ("-m", "samebits.testing.check_kernels", op, arithmetic, memory, enough)
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
    parser.add_argument("--memory", type=Path, help="where what the definitions give is kept between runs")
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1))
    asked = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("sabotage_gpu: there is no CUDA device here to run the kernels on", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(asked.processes) as pool:
        memory = asked.memory or Path(name) / "memory"
        memory.mkdir(parents=True, exist_ok=True)
        inspector = Inspector(Path(name), memory.resolve())
        return _inspect(inspector, pool)


def _inspect(inspector: Inspector, pool: ThreadPoolExecutor) -> int:
    clean = inspector.package("clean")
    jobs = sorted({(fault.op, fault.arithmetic) for fault in FAULTS})

    def untouched(job: tuple[str, str]) -> tuple[list[str], int]:
        return inspector.differing(clean, job[0], job[1], 1)

    for (op, arithmetic), (differ, ran) in zip(jobs, pool.map(untouched, jobs), strict=True):
        if differ:
            print(f"without any fault {differ} of {op} under {arithmetic} differs: the suite is not to be trusted")
            return 1
        print(f"{ran} cases of {op} under {arithmetic} see no difference without a fault", flush=True)

    def one(number: int) -> tuple[list[str], int]:
        fault = FAULTS[number]
        package = inspector.package(f"fault{number}", fault)
        return inspector.differing(package, fault.op, fault.arithmetic, 1)

    caught = 0
    for fault, (differ, ran) in zip(FAULTS, pool.map(one, range(len(FAULTS))), strict=True):
        caught += bool(differ)
        print(f"{'caught' if differ else 'MISSED'} after {ran:2d} cases  {fault}", *differ, flush=True)
    print(f"caught {caught} of {len(FAULTS)}")
    return 0 if caught == len(FAULTS) else 1


if __name__ == "__main__":
    sys.exit(main())
