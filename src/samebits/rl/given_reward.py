"""A reward function of the user's own, by its dotted path."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any

from samebits.evidence.store import sha256_file
from samebits.rl.protocols import RunFailed


@dataclass(frozen=True)
class GivenReward:
    """`function` of a response's text and its problem's label. What it raises or returns may end the run, by name."""

    path: str
    function: Callable[[str, str], object]

    @classmethod
    def load(cls, path: str) -> GivenReward:
        """The function at `path`, package.module.name. Raises ValueError where there is none."""
        try:
            function = pkgutil.resolve_name(path)
        except Exception as error:  # somebody else's module may raise anything
            raise ValueError(
                f"reward: {type(error).__name__}: {error}; want package.module.name of a function of a response and "
                "its label, in an installed package or on PYTHONPATH"
            ) from error
        if not callable(function):
            raise ValueError(f"reward {path!r} must be a function of a response and its label, got {function!r:.80}")
        if inspect.iscoroutinefunction(function):
            raise ValueError(f"reward {path!r} must be a plain function, got one that has to be awaited")
        try:
            inspect.signature(function, follow_wrapped=False).bind("response", "label")
        except TypeError as error:
            raise ValueError(f"reward {path!r} must take a response and its label: {error}") from error
        except ValueError:  # something built in may have no signature
            pass
        return cls(path, function)

    def __call__(self, response: str, label: str) -> float:
        """A finite number. Raises RunFailed for anything else."""
        try:
            value = self.function(response, label)
        except Exception as error:
            raise RunFailed(f"reward {self.path}, label {label!r:.80}: {type(error).__name__}: {error}") from error
        if not isinstance(value, Real) or not isfinite(value):
            raise RunFailed(f"reward {self.path}, label {label!r:.80}: got {value!r:.80}, want a finite number")
        return float(value)

    def record(self) -> dict[str, Any]:
        """Its path, and the sha256 of the file that it lies in (None where there is no such file)."""
        try:
            file = inspect.getsourcefile(inspect.unwrap(self.function))
        except TypeError:  # built in
            file = None
        return {"path": self.path, "source": sha256_file(Path(file)) if file and Path(file).is_file() else None}
