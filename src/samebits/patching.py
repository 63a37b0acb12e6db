"""Patches to other people's code, as objects: which symbol, for which versions, why, how to take them back.

Used where a framework has no extension point. A patch refuses a version that it was not written for, and
says afterwards whether it is really in place: something that imported the name earlier, or a later patch by
somebody else, shows as `in_place() == False`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet

_ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class Symbol:
    """A name in another package that samebits relies on: `package.module:Class.attribute`.

    `holds_for` bounds the versions of `distribution` for which this was checked; `parameters`, when given,
    are the names that its call signature must start with.
    """

    path: str
    distribution: str
    holds_for: str
    parameters: tuple[str, ...] | None = None

    def installed_version(self) -> str:
        """The installed version of the distribution. Raises LookupError when it is not installed."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            raise LookupError(f"{self.path}: distribution {self.distribution!r} is not installed") from None

    def check(self) -> str | None:
        """None when the installed package has this symbol as expected, else a line saying what differs."""
        try:
            found = self.installed_version()
            value = self.resolve()
        except LookupError as error:
            return str(error)
        if not SpecifierSet(self.holds_for).contains(found, prereleases=True):
            return f"{self.path}: checked for {self.distribution} {self.holds_for}, found {found}"
        if self.parameters is not None:
            names = tuple(inspect.signature(value).parameters)
            if names[: len(self.parameters)] != self.parameters:
                return f"{self.path}: parameters must start with {self.parameters}, found {names}"
        return None

    def resolve(self) -> Any:
        """The object that the path names now. Raises LookupError naming the part that is missing."""
        owner, name = self.owner()
        value = getattr(owner, name, _ABSENT)
        if value is _ABSENT:
            raise LookupError(f"{self.path}: {name!r} does not exist in {owner!r}")
        return value

    def owner(self) -> tuple[Any, str]:
        """The module or class that holds the last name of the path, and that name."""
        module_name, _, attributes = self.path.partition(":")
        if not attributes:
            raise ValueError(f"symbol {self.path!r} must look like 'package.module:Class.attribute'")
        try:
            owner: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise LookupError(f"{self.path}: module {error.name!r} does not exist") from None
        *parents, name = attributes.split(".")
        for parent in parents:
            if not hasattr(owner, parent):
                raise LookupError(f"{self.path}: {parent!r} does not exist in {owner!r}")
            owner = getattr(owner, parent)
        return owner, name


def census(symbols: Iterable[Symbol]) -> list[str]:
    """One line per symbol that the installed packages lack or changed; empty when all are as expected."""
    return [line for symbol in symbols if (line := symbol.check()) is not None]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Replace one symbol by `make(original)`; `why` says why this symbol and not an extension point."""

    symbol: Symbol
    why: str
    make: Callable[[Any], Any]

    def apply(self) -> None:
        """Put the replacement in place. Does nothing when it already is.

        Raises RuntimeError when the installed version or signature is not one that the patch was written for.
        """
        if self.in_place():
            return
        problem = self.symbol.check()
        if problem is not None:
            raise RuntimeError(f"patch refused: {problem}")
        owner, name = self.symbol.owner()
        kept = inspect.getattr_static(owner, name)
        replacement = self.make(getattr(owner, name))
        if isinstance(kept, (staticmethod, classmethod)):
            replacement = type(kept)(replacement)
        applied = _Applied(patch=self, kept=kept if name in vars(owner) else _ABSENT, replacement=replacement)
        _applied.setdefault(self.symbol.path, []).append(applied)
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Put back what was there before. Raises RuntimeError when this patch is not the one in place."""
        if not self.in_place():
            raise RuntimeError(f"{self.symbol.path}: this patch is not in place, so it can't be undone")
        owner, name = self.symbol.owner()
        kept = _applied[self.symbol.path].pop().kept
        if kept is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, kept)

    def in_place(self) -> bool:
        """True while the symbol is this patch's replacement and nobody put something else over it."""
        applied = _applied.get(self.symbol.path)
        if not applied or applied[-1].patch is not self:
            return False
        owner, name = self.symbol.owner()
        return inspect.getattr_static(owner, name, None) is applied[-1].replacement

    @contextmanager
    def applied(self) -> Iterator[None]:
        """In place inside the `with` block; afterwards as before it."""
        if self.in_place():
            yield
            return
        self.apply()
        try:
            yield
        finally:
            self.undo()

    def record(self) -> dict[str, object]:
        """Plain data for a route record: symbol, versions, reason, whether it is in place now."""
        return {
            "symbol": self.symbol.path,
            "distribution": self.symbol.distribution,
            "version": self.symbol.installed_version(),
            "holds_for": self.symbol.holds_for,
            "why": self.why,
            "in_place": self.in_place(),
        }


@dataclass(frozen=True)
class _Applied:
    patch: Patch
    kept: Any
    replacement: Any


# Of each symbol, the patches over one another, the last one on top.
_applied: dict[str, list[_Applied]] = {}
