"""Which provider, in which mode: two flags, read once, and one import."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal

from samebits.linear_logp.errors import LinearLogpProviderUnavailable
from samebits.linear_logp.types import LinearLogpRequest

Mode = Literal["auto", "strict", "audit"]
MODES: tuple[Mode, ...] = ("auto", "strict", "audit")
ENTRY_POINTS = "samebits.linear_logp_providers"
OWN_PROVIDER = "samebits.linear_logp.provider.provider"

# What comes back is foreign: a LinearLogpResult, a mapping or an object with its attributes.
Provider = Callable[[LinearLogpRequest], Any]


@dataclass(frozen=True, kw_only=True)
class ProviderSettings:
    """One decision for all processes: no path means the framework's own code, untouched.

    `route` is what the case declares for the trainer's log-probability: R a provider, P production code.
    `expected_contract` is the arithmetic that the other side scored under; None where there is no other side.
    """

    path: str | None = None
    mode: Mode = "auto"
    route: Literal["R", "P"] = "R"
    expected_contract: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"linear_logp_provider_mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.route not in ("R", "P"):
            raise ValueError(f"route must be 'R' or 'P', got {self.route!r}")
        if self.path is not None and not self.path.strip():
            raise ValueError("linear_logp_provider is blank; give a dotted path or a registered name, or leave it out")
        if self.mode == "strict" and self.path and self.route == "P":
            raise ValueError(
                f"linear_logp_provider {self.path!r} is strict, but the case declares production code (P) for the "
                "trainer's log-probability; declare R, or drop the provider"
            )
        if self.mode == "audit" and self.path and self.route == "R":
            raise ValueError("audit returns what production code computes; declare P for the trainer's log-probability")

    @classmethod
    def from_args(cls, args: Any, route: Literal["R", "P"] = "R") -> ProviderSettings:
        """From parsed flags; a missing, None or blank path is no provider, a missing mode is auto."""
        path = (getattr(args, "linear_logp_provider", None) or "").strip() or None
        mode: Any = (getattr(args, "linear_logp_provider_mode", None) or "auto").strip().lower()
        return cls(path=path, mode=mode, route=route)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the two flags."""
    parser.add_argument(
        "--linear-logp-provider",
        default=None,
        help="dotted path of a callable, or a registered name; if unset, the framework's own code",
    )
    parser.add_argument("--linear-logp-provider-mode", default="auto", choices=MODES, help="what a refusal means")


def load_provider(path: str) -> Provider:
    """The callable that `path` names: `package.module.name`, or a name in the entry-point group.

    Raises LinearLogpProviderUnavailable when it is not there or needs something that is not installed, TypeError
    when it can't be called. Whatever else importing it raises is a bug in it and comes out unchanged, a missing
    name inside its own package included.
    """
    module_name, _, attribute = path.rpartition(".")
    if "" in path.split("."):
        raise LinearLogpProviderUnavailable(f"provider {path!r} is no dotted path: want package.module.name")
    if not module_name:
        module_name, attribute = _registered(path)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        if _is_own_fault(error, module_name):
            raise
        raise LinearLogpProviderUnavailable(f"provider {path!r} cannot be imported: {error}") from error
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise LinearLogpProviderUnavailable(f"provider {path!r}: module {module_name} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"provider {path!r} must be callable, got {type(found).__name__}")
    return found


def _registered(name: str) -> tuple[str, str]:
    found = [entry for entry in entry_points(group=ENTRY_POINTS) if entry.name == name]
    if len({entry.value for entry in found}) > 1:
        raise ValueError(f"provider {name!r} is registered more than once: {', '.join(e.value for e in found)}")
    if not found:
        raise LinearLogpProviderUnavailable(
            f"provider {name!r} is no dotted path, and nothing is registered under that name in {ENTRY_POINTS}"
        )
    return found[0].module, found[0].attr


def _is_own_fault(error: ImportError, module_name: str) -> bool:
    """Whether a provider's package is there but lacks something of its own: a bug, not an absence."""
    missing = error.name or ""
    package = module_name.partition(".")[0]
    if missing.partition(".")[0] != package:
        return False
    not_there = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{missing}.")
    return not not_there
