"""What a conformance case is: two computations whose results must agree in every bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from samebits.backends import pick
from samebits.bits import Difference, first_difference
from samebits.testing.cases.guards import guarded


@dataclass(frozen=True)
class Subject:
    """Which backend computes, and on which device it gets its tensors."""

    backend: str
    device: str = "cpu"

    def put(self, tensor: Tensor) -> Tensor:
        """The tensor on this subject's device; strides stay as they are."""
        if self.device == "cpu":
            return tensor
        moved = tensor.new_empty(0, device=self.device)
        storage = tensor.untyped_storage().to(device=self.device)
        return moved.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[arg-type]


DEFINITION = Subject("reference")

Compute = Callable[[Subject], Sequence[Tensor]]


@dataclass(frozen=True)
class Case:
    """`left` and `right` compute tensors that must agree in every bit.

    A case *by definition* compares the subject (left) with the definition (right); the others compare the subject
    with itself under another schedule. Making a case costs nothing: tensors are drawn when a side is computed.
    `long` cases belong to `make conformance`; `only` names the one backend that has such a schedule.
    """

    op: str
    name: str
    left: Compute
    right: Compute
    by_definition: bool = False
    long: bool = False
    only: str = ""

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
        return list(case.right(DEFINITION))
    with guarded():
        return [tensor.detach().cpu() for tensor in case.right(subject)]


def difference(case: Case, subject: Subject) -> Difference | None:
    """The first difference between the two sides of a case, or None. Raises ValueError where they can't be compared."""
    left, right = left_of(case, subject), right_of(case, subject)
    if len(left) != len(right):
        raise ValueError(f"{case}: {len(left)} tensors against {len(right)}")
    for a, b in zip(left, right, strict=True):
        found = first_difference(a, b)
        if found is not None:
            return found
    return None


def implementation(op: str, backends: dict[str, ModuleType], at: Subject) -> ModuleType:
    """The backend's module itself, for results that the public function does not return."""
    return pick(op, backends, at.backend)
