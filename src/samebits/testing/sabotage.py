"""Build the kernels wrongly on purpose, and count which conformance cases notice.

`python -m samebits.testing.sabotage` (in a checkout: it compiles the sources) prints `caught N of N` and fails
below N.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from samebits import _cpu
from samebits.testing.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[3]


class Workshop:
    """A copy of the native sources with a build tree of its own, for this processor's instruction set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources = folder / "src/samebits/csrc"
        shutil.copytree(ROOT / "src/samebits/csrc", self.sources)
        shutil.copy(ROOT / "CMakeLists.txt", folder)
        self._configure("")

    def library(self) -> Path:
        """Build, and return the path of the extension module."""
        _run("cmake", "--build", self.folder / "build", "--target", "_cpu")
        (library,) = (self.folder / "build").glob("_cpu*.so")
        return library

    def put_in(self, fault: Fault) -> None:
        """Make the sources wrong. ValueError when the kernel no longer holds the text that the fault replaces."""
        if fault.flag:
            self._configure(fault.flag)
            return
        path = self.sources / fault.file
        text = path.read_text()
        for old, new in fault.edits:
            if text.count(old) != 1:
                raise ValueError(
                    f"{fault}: {fault.file} holds {old!r} {text.count(old)} times, wanted once; "
                    "bring the fault up to date with the kernel"
                )
            text = text.replace(old, new)
        path.write_text(text)

    def take_out(self, fault: Fault) -> None:
        if fault.flag:
            self._configure("")
        else:
            shutil.copy(ROOT / "src/samebits/csrc" / fault.file, self.sources / fault.file)

    def _configure(self, flag: str) -> None:
        _run(
            "cmake", "-S", self.folder, "-B", self.folder / "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}", f"-DSAMEBITS_ONLY_ISA={_cpu.instruction_set()}",
            f"-DSAMEBITS_EXTRA_FLAGS={flag}",
        )  # fmt: skip


class Inspection:
    """Which cases of an op see a difference with a given library. Definitions are computed once per op."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def differing(self, library: Path, op: str) -> tuple[list[str], int]:
        """(names of the cases that notice, number of cases)."""
        script = "samebits.testing.check_library"
        out = _run(sys.executable, "-m", script, library, op, self.folder / f"{op}.json")
        result = json.loads(out.splitlines()[-1])
        return result["differ"], result["cases"]


def applicable(faults: Iterable[Fault]) -> list[Fault]:
    """The faults whose code this processor runs."""
    return [fault for fault in faults if fault.isa in ("", _cpu.instruction_set())]


def main() -> int:
    faults = applicable(FAULTS)
    caught = 0
    with tempfile.TemporaryDirectory() as name:
        workshop, inspection = Workshop(Path(name) / "build"), Inspection(Path(name))
        clean = workshop.library()
        for op in sorted({fault.op for fault in faults}):
            differ, cases = inspection.differing(clean, op)
            if differ:
                print(f"without any fault {differ} of {cases} cases of {op} differ: the suite is not to be trusted")
                return 1
        for fault in faults:
            workshop.put_in(fault)
            differ, cases = inspection.differing(workshop.library(), fault.op)
            workshop.take_out(fault)
            caught += bool(differ)
            print(f"{'caught' if differ else 'MISSED'} by {len(differ):2d} of {cases:2d} cases  {fault}", flush=True)
    for fault in FAULTS:
        if fault not in faults:
            print(f"left out on this processor (needs {fault.isa})  {fault}")
    print(f"caught {caught} of {len(faults)}")
    return 0 if caught == len(faults) else 1


def _run(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, timeout=900)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
