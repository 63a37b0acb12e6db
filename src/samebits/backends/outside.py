"""Backends that other packages bring: modules with the functions of one op, announced by name.

A package announces a module with an entry point of the group `samebits.backends`, whose name is `OP.BACKEND`:

    [project.entry-points."samebits.backends"]
    "rms_norm.fast" = "fast_kernels.rms_norm"

or, in a process of its own, by `register("rms_norm", "fast", "fast_kernels.rms_norm")`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.metadata import entry_points
from types import ModuleType

GROUP = "samebits.backends"

_registered: dict[tuple[str, str], str] = {}


def register(op: str, backend: str, module: str) -> None:
    """Announce the module at the import path `module` as `backend` of `op`; it is imported when first chosen."""
    _registered[op, backend] = module


def announced() -> Iterator[tuple[str, str]]:
    """(op, backend) of everything that was registered or is announced by an installed package."""
    yield from _registered
    for point in entry_points(group=GROUP):
        op, _, backend = point.name.partition(".")
        yield op, backend


def find(op: str, backend: str) -> ModuleType | None:
    """The announced module, imported; None where nobody announced it."""
    path = _registered.get((op, backend))
    if path is None:
        points = entry_points(group=GROUP, name=f"{op}.{backend}")
        path = next((point.value for point in points), None)
    return None if path is None else importlib.import_module(path)
