"""Build the kernels wrongly on purpose, and count which conformance cases notice.

`python -m samebits.testing.sabotage` (in a checkout: it compiles the sources) prints `caught N of N` and fails
below N. One fault is compiled while others are looked at. What was found is kept, under a name of the sources that it
depends on: a run that was interrupted goes on where it stopped, `--again` starts over.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock

import torch

from samebits import _cpu
from samebits.contract import digest_of
from samebits.testing.faults import FAULTS, Fault, with_fault

ROOT = Path(__file__).resolve().parents[3]
NATIVE = ROOT / "src/samebits/csrc"
CRASHED = "(the process died)"
# What a wrong kernel does to its process. A signal from outside, as when memory runs out, is no finding.
CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}


class Workshop:
    """A copy of the native sources with a build tree of its own, for this processor's instruction set.

    A folder that was used before is brought up to date: only what changed is compiled again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources = folder / "src/samebits/csrc"
        self._flag: str | None = None

    def build(self, fault: Fault | None, library: Path) -> Path:
        """Compile with this fault, or with none, and put the extension module at `library`.

        ValueError when the kernel no longer holds the text that the fault replaces.
        """
        self._restore()
        flag = "" if fault is None else fault.flag
        if fault is not None and not flag:
            path = self.sources / fault.file
            path.write_text(with_fault(path.read_text(), fault))
        if flag != self._flag:
            self._configure(flag)
        _run("cmake", "--build", self.folder / "build", "--target", "_cpu")
        (built,) = (self.folder / "build").glob("_cpu*.so")
        shutil.copy(built, library)
        return library

    def _restore(self) -> None:
        """Take the last fault out again. Files that are right keep their time, so that they are not compiled."""
        wanted = {path.relative_to(NATIVE): path for path in NATIVE.rglob("*") if path.is_file()}
        for path in [path for path in self.sources.rglob("*") if path.is_file()]:
            if path.relative_to(self.sources) not in wanted:
                path.unlink()
        for name, path in [*wanted.items(), (Path("../../../CMakeLists.txt"), ROOT / "CMakeLists.txt")]:
            copy = self.sources / name
            if not copy.exists() or copy.read_bytes() != path.read_bytes():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)

    def _configure(self, flag: str) -> None:
        _run(
            "cmake", "-S", self.folder, "-B", self.folder / "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}", f"-DSAMEBITS_ONLY_ISA={_cpu.instruction_set()}",
            f"-DSAMEBITS_EXTRA_FLAGS={flag}",
        )  # fmt: skip
        self._flag = flag


@dataclass(frozen=True)
class Finding:
    """The names of the cases that noticed a fault, and how many cases there were."""

    noticed: list[str]
    cases: int


class Inspection:
    """Which cases of an op see a difference with a given library. What is right is found out once per op."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def look(self, library: Path, op: str) -> Finding:
        command = [sys.executable, "-m", "samebits.testing.check_library", library, op, self.folder / f"{op}.json"]
        done = _finished(*command)
        if -done.returncode in CRASHES:  # a fault may well write where it must not
            return Finding([CRASHED], 1)
        _must_be_well(command, done)
        return Finding(**json.loads(done.stdout.splitlines()[-1]))


class NotTrusted(RuntimeError):
    """The cases see a difference where there is no fault."""


def applicable(faults: Iterable[Fault]) -> list[Fault]:
    """The faults whose code this processor runs."""
    return [fault for fault in faults if fault.isa in ("", _cpu.instruction_set())]


def seed(faults: Sequence[Fault], workshop: Workshop, folder: Path, found: Callable[[Fault, Finding], None]) -> None:
    """Make the kernels wrong in each way and call `found` with what came of it, in no order; one call at a time.

    `folder` keeps what is right. Raises NotTrusted when the kernels as they are do not pass.
    """
    inspection, one_at_a_time = Inspection(folder), Lock()

    def examine(fault: Fault, library: Path) -> None:
        finding = inspection.look(library, fault.op)
        library.unlink()
        with one_at_a_time:
            found(fault, finding)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        clean = workshop.build(None, folder / "clean.so")
        ops = sorted({fault.op for fault in faults})
        for op, finding in zip(ops, pool.map(lambda op: inspection.look(clean, op), ops), strict=True):
            if finding.noticed:
                raise NotTrusted(f"without any fault {finding.noticed} of {finding.cases} cases of {op} differ")
        waiting: list[Future[None]] = []
        # neighbours that change the same file: it is compiled once for each of them, and the others not at all
        for at, fault in enumerate(sorted(faults, key=lambda fault: (fault.flag, fault.file))):
            waiting.append(pool.submit(examine, fault, workshop.build(fault, folder / f"{at}.so")))
        for future in waiting:
            future.result()


def sources() -> str:
    """Names all that a finding depends on, besides the fault itself."""
    package = ROOT / "src/samebits"
    skipped = {package / "testing/faults.py", package / "testing/sabotage.py"}
    parts = ("csrc", "ops", "arithmetic", "backends", "bits", "contract", "testing")
    files = [path for part in parts for path in (package / part).rglob("*") if path.is_file() and path not in skipped]
    texts = {path.relative_to(ROOT).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files}
    return digest_of([texts, torch.__version__, _cpu.instruction_set()])


class Notebook:
    """Findings in a file, by fault."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.findings: dict[str, Finding] = {}
        if path.exists():
            self.findings = {key: Finding(**value) for key, value in json.loads(path.read_text()).items()}

    def get(self, fault: Fault) -> Finding | None:
        return self.findings.get(digest_of(asdict(fault)))

    def add(self, fault: Fault, finding: Finding) -> None:
        self.findings[digest_of(asdict(fault))] = finding
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({key: asdict(value) for key, value in self.findings.items()}, indent=1))
        new.replace(self.path)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m samebits.testing.sabotage", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/sabotage", help="keeps the build and the findings")
    parser.add_argument("--filter", default="", metavar="TEXT", help="words that the name of a fault must contain")
    parser.add_argument("--again", action="store_true", help="forget what was found earlier")
    asked = parser.parse_args(words)
    chosen = [fault for fault in FAULTS if all(word in str(fault) for word in asked.filter.split())]
    faults = applicable(chosen)
    kept = asked.folder / sources()[:12]
    if asked.again and kept.exists():
        shutil.rmtree(kept)
    kept.mkdir(parents=True, exist_ok=True)
    notebook = Notebook(kept / "found.json")

    def report(fault: Fault, finding: Finding, when: str = "") -> None:
        caught = "caught" if finding.noticed else "MISSED"
        print(f"{caught} by {len(finding.noticed):2d} of {finding.cases:2d} cases  {fault}{when}", flush=True)

    def found(fault: Fault, finding: Finding) -> None:
        notebook.add(fault, finding)
        report(fault, finding)

    missing = []
    for fault in faults:
        earlier = notebook.get(fault)
        if earlier is None:
            missing.append(fault)
        else:
            report(fault, earlier, " (found earlier)")
    if missing:
        seed(missing, Workshop(asked.folder / "workshop"), kept, found)
    for fault in chosen:
        if fault not in faults:
            print(f"left out on this processor (needs {fault.isa})  {fault}")
    caught = [fault for fault in faults if (finding := notebook.get(fault)) is not None and finding.noticed]
    print(f"caught {len(caught)} of {len(faults)}")
    return 0 if len(caught) == len(faults) > 0 else 1


def _finished(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, timeout=1800)


def _must_be_well(command: Sequence[object], done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def _run(*command: object) -> None:
    _must_be_well(command, _finished(*command))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
