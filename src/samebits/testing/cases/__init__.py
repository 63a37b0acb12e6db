"""The conformance cases of every op: which computations must agree in every bit, whoever computes them.

`cases()` is the table. Making it draws no numbers; a case draws its own, seeded, when a side is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from samebits.testing.cases import (
    attention,
    embedding,
    linear,
    logprob,
    rms_norm,
    rotary,
    sample,
    sample_support,
    swiglu,
)
from samebits.testing.cases.case import DEFINITION as DEFINITION
from samebits.testing.cases.case import Case as Case
from samebits.testing.cases.case import Subject as Subject
from samebits.testing.cases.case import against_definition as against_definition
from samebits.testing.cases.case import applies as applies
from samebits.testing.cases.case import compared as compared
from samebits.testing.cases.case import difference as difference
from samebits.testing.cases.case import left_of as left_of
from samebits.testing.cases.case import right_of as right_of
from samebits.testing.cases.guards import OutOfBounds as OutOfBounds

_TABLE: dict[str, Callable[[], Iterator[Case]]] = {
    module.OP: module.cases
    for module in (embedding, rms_norm, linear, rotary, attention, swiglu, logprob, sample_support, sample)
}
OPS = tuple(_TABLE)


def cases(op: str | None = None, long: bool = False) -> tuple[Case, ...]:
    """The cases of one op, or of all; with `long` those of `make conformance` too. ValueError for an unknown op."""
    if op is not None and op not in _TABLE:
        raise ValueError(f"there is no op {op!r}; there are {', '.join(OPS)}")
    chosen = OPS if op is None else (op,)
    return tuple(case for name in chosen for case in _TABLE[name]() if long or not case.long)
