"""Build the kernels wrongly on purpose, and count which conformance cases notice.

`python -m samebits.testing.sabotage` (in a checkout: it compiles the sources) prints `caught N of N` and fails below N.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from samebits import _cpu

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Fault:
    """One replacement in one file of csrc/, or one compiler flag; `op` names the cases that must notice."""

    name: str
    op: str
    file: str = ""
    old: str = ""
    new: str = ""
    flag: str = ""

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"


class Workshop:
    """A copy of the native sources with a build tree of its own, for one instruction set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources = folder / "src/samebits/csrc"
        shutil.copytree(ROOT / "src/samebits/csrc", self.sources)
        shutil.copy(ROOT / "CMakeLists.txt", folder)
        self.configure("")

    def configure(self, flag: str) -> None:
        _run(
            "cmake", "-S", self.folder, "-B", self.folder / "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}", f"-DSAMEBITS_ONLY_ISA={_cpu.instruction_set()}",
            f"-DSAMEBITS_EXTRA_FLAGS={flag}",
        )  # fmt: skip

    def library(self) -> Path:
        _run("cmake", "--build", self.folder / "build", "--target", "_cpu")
        (library,) = (self.folder / "build").glob("_cpu*.so")
        return library

    def with_fault(self, fault: Fault) -> Path:
        """The library with one fault in it; `restore` takes it out again."""
        if fault.flag:
            self.configure(fault.flag)
            return self.library()
        path = self.sources / fault.file
        text = path.read_text()
        if text.count(fault.old) != 1:
            raise ValueError(
                f"{fault}: {fault.file} holds the text {fault.old!r} {text.count(fault.old)} times, wanted once; "
                "bring the fault up to date with the kernel"
            )
        path.write_text(text.replace(fault.old, fault.new))
        return self.library()

    def restore(self, fault: Fault) -> None:
        if fault.flag:
            self.configure("")
        else:
            shutil.copy(ROOT / "src/samebits/csrc" / fault.file, self.sources / fault.file)


def differing_cases(library: Path, op: str) -> tuple[list[str], int]:
    """(names of the cases of `op` that see a difference with this library, number of cases)."""
    out = _run(sys.executable, Path(__file__).with_name("check_library.py"), library, op)
    result = json.loads(out.splitlines()[-1])
    return result["differ"], result["cases"]


def _run(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout
