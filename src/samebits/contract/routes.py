"""The three module groups of a model, and which route each takes on one side. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Route = Literal["R", "P"]
# The route of the trainer, then that of the rollout side.
Case = Literal["R/R", "P/P", "R/P", "P/R"]
CASES: tuple[Case, ...] = get_args(Case)
# In model order.
MODULES = ("attention", "ffn", "logp")


@dataclass(frozen=True)
class ModuleRoutes:
    """Per module group: R is the samebits route, P is the engine's own code. Raises ValueError for another word."""

    attention: Route = "R"
    ffn: Route = "R"
    logp: Route = "R"

    def __post_init__(self) -> None:
        for group, route in self.groups().items():
            if route not in ("R", "P"):
                raise ValueError(f"case of {group} must be 'R' or 'P', got {route!r}")

    def groups(self) -> dict[str, Route]:
        """The groups of MODULES and their routes."""
        return {"attention": self.attention, "ffn": self.ffn, "logp": self.logp}

    @property
    def all_native(self) -> bool:
        return set(self.groups().values()) == {"P"}

    @property
    def all_strict(self) -> bool:
        return set(self.groups().values()) == {"R"}
