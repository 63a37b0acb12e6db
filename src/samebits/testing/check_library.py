"""check_library.py LIBRARY OP MEMORY: run the conformance cases of an op with the kernels of a given library.

The last line printed is JSON: how many cases there are and which of them see a difference. What the
definitions give is kept in the file MEMORY between calls, since no fault in a kernel can change it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path


def load_kernels(library: str) -> None:
    """Make `library` the module samebits._cpu of this process."""
    spec = importlib.util.spec_from_file_location("samebits._cpu", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["samebits._cpu"] = module


def main(library: str, op: str, memory: Path) -> None:
    load_kernels(library)

    from samebits.bits import digest
    from samebits.testing.cases import CASES

    known = json.loads(memory.read_text()) if memory.exists() else {}
    chosen = [case for case in CASES if case.op == op]
    differ = []
    for case in chosen:
        wanted = known.get(case.name) or [digest(tensor) for tensor in case.right()]
        if case.by_definition:
            known[case.name] = wanted
        if [digest(tensor) for tensor in case.left()] != wanted:
            differ.append(case.name)
    memory.write_text(json.dumps(known))
    print(json.dumps({"cases": len(chosen), "differ": differ}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
