"""check_kernels.py OP ARITHMETIC FOLDER [ENOUGH]: run an op's conformance cases with the Triton kernels, on a card.

The last line printed is JSON: where this package lies, how many cases ran, which of them see a difference, and which
the kernels refuse; with ENOUGH it ends after so many differences. FOLDER holds what definitions give; cases of which
it does not know that come last.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import samebits
from samebits.bits import digest
from samebits.testing.cases import Case, Subject, applies, cases, left_of, right_of
from samebits.testing.definitions import Definitions


def examine(op: str, subject: Subject, definitions: Definitions, enough: int) -> dict[str, Any]:
    """`noticed`: the cases that see a difference; `refused`: those that the kernels refuse; `cases`: how many ran."""

    def slow(case: Case) -> bool:
        return case.by_definition and definitions.known(case, subject.arithmetic) is None

    noticed: list[str] = []
    refused: list[str] = []
    ran = 0
    for case in sorted((case for case in cases(op) if applies(case, subject)), key=slow):
        try:
            same = _same(case, subject, definitions)
        except ValueError:
            refused.append(case.name)
            continue
        except torch.OutOfMemoryError:  # others fill the card: says nothing about the kernels
            raise
        except (AssertionError, IndexError, RuntimeError):  # written out of bounds, or stopped by the device
            same = False
        ran += 1
        if not same:
            noticed.append(case.name)
        if len(noticed) == enough:
            break
    return {"noticed": noticed, "refused": refused, "cases": ran}


def _same(case: Case, subject: Subject, definitions: Definitions) -> bool:
    found = [digest(tensor) for tensor in left_of(case, subject)]
    if case.by_definition:
        return found == definitions.digests(case, subject.arithmetic)
    return found == [digest(tensor) for tensor in right_of(case, subject)]


def main(op: str, arithmetic: str, folder: Path, enough: int = sys.maxsize) -> None:
    subject = Subject("triton", "cuda", arithmetic)
    found = examine(op, subject, Definitions(folder), enough)
    print(json.dumps({"package": samebits.__path__[0], **found}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
