"""What a conformance case is: two computations whose results must agree in every bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TypedDict

import torch
from torch import Tensor

from samebits.backends import pick
from samebits.bits import first_difference
from samebits.testing.cases.guards import guarded


class How(TypedDict):
    backend: str
    arithmetic: str


@dataclass(frozen=True)
class Subject:
    """Which backend computes in which arithmetic, and on which device it gets its tensors."""

    backend: str
    device: str = "cpu"
    arithmetic: str = "fma32"

    @property
    def how(self) -> How:
        """The keyword arguments of an op that knows arithmetics."""
        return {"backend": self.backend, "arithmetic": self.arithmetic}

    def put(self, tensor: Tensor) -> Tensor:
        """The tensor on this subject's device; strides stay as they are."""
        if self.device == "cpu":
            return tensor
        moved = tensor.new_empty(0, device=self.device)
        storage = tensor.untyped_storage().to(device=self.device)
        return moved.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


DEFINITION = Subject("reference")

Compute = Callable[[Subject], Sequence[Tensor]]


@dataclass(frozen=True)
class Case:
    """`left` and `right` compute tensors that must agree in every bit.

    A case *by definition* compares the subject (left) with the definition (right); the others compare the subject
    with itself under another schedule. Making a case costs nothing: tensors are drawn when a side is computed.
    `long` cases belong to `make conformance`; `only` names the one backend that has such a schedule, `arithmetic` the
    one arithmetic that promises such an equality.
    """

    op: str
    name: str
    left: Compute
    right: Compute
    by_definition: bool = False
    long: bool = False
    only: str = ""
    arithmetic: str = ""

    def __str__(self) -> str:
        return f"{self.op} {self.name}"


def against_definition(op: str, name: str, compute: Compute, long: bool = False) -> Case:
    """The same computation by the subject and by the definition."""
    return Case(op, name, compute, compute, by_definition=True, long=long)


def left_of(case: Case, subject: Subject) -> list[Tensor]:
    """What the subject gives, on the CPU. Raises OutOfBounds when it wrote outside the tensors that it allocated."""
    with guarded():
        return [tensor.detach().cpu() for tensor in case.left(subject)]


def right_of(case: Case, subject: Subject) -> list[Tensor]:
    """What it must give, on the CPU."""
    if case.by_definition:
        with _one_thread():
            return list(case.right(replace(DEFINITION, arithmetic=subject.arithmetic)))
    with guarded():
        return [tensor.detach().cpu() for tensor in case.right(subject)]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Definitions are many small steps of torch: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compared(left: Sequence[Tensor], right: Sequence[Tensor]) -> str:
    """How the two sides of a case first differ, in words; empty where every bit agrees."""
    if len(left) != len(right):
        return f"{len(left)} tensors against {len(right)}"
    for at, (a, b) in enumerate(zip(left, right, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"output {at} is {a.dtype} {list(a.shape)}, wanted {b.dtype} {list(b.shape)}"
        found = first_difference(a, b)
        if found is not None:
            return f"output {at}: {found}"
    return ""


def difference(case: Case, subject: Subject) -> str:
    """How the two sides of a case first differ for a subject, in words; empty where every bit agrees."""
    return compared(left_of(case, subject), right_of(case, subject))


def implementation(op: str, backends: Mapping[str, ModuleType], at: Subject, x: Tensor) -> ModuleType:
    """The backend's module itself, for results that the public function does not return."""
    return pick(op, backends, at.backend, x)


def applies(case: Case, subject: Subject) -> bool:
    """Is there such a schedule, and such a promise, for this subject?"""
    return case.only in ("", subject.backend) and case.arithmetic in ("", subject.arithmetic)
