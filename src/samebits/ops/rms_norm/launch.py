"""How many rows a program takes: a function of the shape alone. No choice here can change a bit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """Programs of `rows` rows; `shared`: the Gluon form, one row through shared memory."""

    rows: int
    warps: int
    shared: bool = False


SHARED_WIDTHS = range(1024, 8193)


def forward(width: int, shared: bool = False, add: bool = False) -> Launch:
    """Wide rows have threads of their own, narrow ones share a program.

    `shared`: the device can take that form; `add`: a residual is added, which is twice the loads and stores.
    """
    if shared and width in SHARED_WIDTHS:
        return Launch(1, 8 if add or width > 4096 else 4, shared=True)
    if width > 512:
        return Launch(1, 2) if width > 1024 else Launch(1, 1)
    return Launch(16, 4)


def backward(width: int) -> Launch:
    """As forward; it keeps two values per element in registers, so it takes more threads."""
    return Launch(1, 4) if width > 1024 else forward(width)
