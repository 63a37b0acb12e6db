"""check_library.py LIBRARY OP MEMORY: run the conformance cases of an op with the kernels of a given library.

The last line printed is JSON: how many cases there are and which of them see a difference. What the definitions give,
and which cases a library without a fault can't serve (it has one instruction set), is kept in the file MEMORY between
calls: the first call makes it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from samebits.bits import digest
from samebits.testing.cases import Subject, applies, cases, left_of, right_of

REFUSED = ["refused"]


def load_kernels(library: str) -> None:
    """Make `library` the module samebits._cpu of this process."""
    spec = importlib.util.spec_from_file_location("samebits._cpu", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["samebits._cpu"] = module


def examine(subject: Subject, op: str, memory: Path, enough: int = sys.maxsize) -> tuple[list[str], int]:
    """(names of the cases of `op` that see a difference, cases that ran); stops after `enough` of them have."""
    first = not memory.exists()
    known: dict[str, list[str]] = {} if first else json.loads(memory.read_text())
    noticed: list[str] = []
    ran = 0
    for case in cases(op):
        wanted = known.get(case.name)
        if wanted == REFUSED or not applies(case, subject) or len(noticed) == enough:
            continue
        ran += 1
        try:
            if wanted is None:
                wanted = [digest(tensor) for tensor in right_of(case, subject)]
            same = [digest(tensor) for tensor in left_of(case, subject)] == wanted
        except ValueError:
            wanted, same = REFUSED, first
        except (AssertionError, IndexError, RuntimeError):  # written out of bounds, or refused by a kernel
            same = False
        if first and wanted is not None and (case.by_definition or wanted == REFUSED):
            known[case.name] = wanted
        if not same:
            noticed.append(case.name)
    if first:
        memory.write_text(json.dumps(known))
    return noticed, ran


def main(library: str, op: str, memory: Path) -> None:
    load_kernels(library)
    noticed, ran = examine(Subject("cpu"), op, memory)
    print(json.dumps({"noticed": noticed, "cases": ran}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
