"""check_library.py LIBRARY OP: run the conformance cases of an op with the kernels of a given library.

The last line printed is JSON: how many cases there are and which of them see a difference.
"""

from __future__ import annotations

import importlib.util
import json
import sys


def main(library: str, op: str) -> None:
    spec = importlib.util.spec_from_file_location("samebits._cpu", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["samebits._cpu"] = module

    from samebits.testing.cases import CASES, difference

    chosen = [case for case in CASES if case.op == op]
    differ = [case.name for case in chosen if difference(case) is not None]
    print(json.dumps({"cases": len(chosen), "differ": differ}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
