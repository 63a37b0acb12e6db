"""check_kernels.py OP ARITHMETIC MEMORY [ENOUGH]: run an op's conformance cases with the Triton kernels, on a card.

The last line printed is JSON: where this package lies, how many cases ran and which of them see a difference; with
ENOUGH it ends after so many. What the definitions give is kept in the file MEMORY, as in check_library.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import samebits
from samebits.testing.cases import Subject
from samebits.testing.check_library import examine


def main(op: str, arithmetic: str, memory: Path, enough: int = sys.maxsize) -> None:
    noticed, ran = examine(Subject("triton", "cuda", arithmetic), op, memory, enough)
    print(json.dumps({"package": samebits.__path__[0], "noticed": noticed, "cases": ran}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
