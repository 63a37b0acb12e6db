"""One rule: a backend is named, and either it exists for the op or the call fails."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType


class NoBackend(ValueError):
    """The named backend does not serve this op."""


def pick(op: str, backends: Mapping[str, ModuleType], name: str) -> ModuleType:
    """The module that implements `op` under `name`; NoBackend names what exists instead."""
    try:
        return backends[name]
    except KeyError:
        raise NoBackend(f"{op}: no backend {name!r}; it has {', '.join(sorted(backends))}") from None
