"""Schedules that the compiled CPU backend can be forced into; by the contract none of them moves a bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from samebits.testing.cases.case import Case, Compute, Subject

INSTRUCTION_SETS = ("scalar", "avx2")
THREADS = (1, 3, 7)


@contextmanager
def threads(count: int) -> Iterator[None]:
    from samebits import _cpu  # a machine with a GPU may be without it, and has none of these cases

    _cpu.set_threads(count)
    try:
        yield
    finally:
        _cpu.set_threads(0)


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Raises ValueError where this processor lacks it."""
    from samebits import _cpu

    before = _cpu.instruction_set()
    _cpu.force_instruction_set(name)
    try:
        yield
    finally:
        _cpu.force_instruction_set(before)


def forced(op: str, name: str, compute: Compute, long: bool = False) -> Iterator[Case]:
    """`compute` as it comes against the same with 1, 3 and 7 threads, and with each older instruction set."""

    def with_threads(count: int) -> Case:
        def right(at: Subject) -> Sequence[Tensor]:
            with threads(count):
                return compute(at)

        return Case(op, f"{name}-threads{count}", compute, right, only="cpu", long=long)

    def with_instructions(which: str) -> Case:
        def right(at: Subject) -> Sequence[Tensor]:
            with instruction_set(which):
                return compute(at)

        return Case(op, f"{name}-{which}", compute, right, only="cpu", long=long)

    yield from (with_threads(count) for count in THREADS)
    yield from (with_instructions(which) for which in INSTRUCTION_SETS)
