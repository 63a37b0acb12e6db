"""Patch objects: bounds, undo, proof; the census names what is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from samebits.patching import Patch, Symbol, census

DISTRIBUTION = "pytest"


class Base:
    def inherited(self) -> str:
        return "base"


class Target(Base):
    def method(self, x: int) -> int:
        return x + 1

    @staticmethod
    def static(x: int) -> int:
        return x + 2

    @classmethod
    def klass(cls) -> str:
        return cls.__name__


def free(x: int) -> int:
    return x


@pytest.fixture
def target() -> Iterator[ModuleType]:
    module = ModuleType("samebits_patch_target")
    module.Target, module.free = Target, free  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def symbol(attributes: str, **changes: object) -> Symbol:
    settings: dict[str, object] = {"distribution": DISTRIBUTION, "holds_for": ">=1", **changes}
    return Symbol(path=f"samebits_patch_target:{attributes}", **settings)  # type: ignore[arg-type]


def patch(attributes: str, make: object, **changes: object) -> Patch:
    return Patch(symbol=symbol(attributes, **changes), why="the test wants it", make=make)  # type: ignore[arg-type]


def test_function_method_and_static_method_are_replaced_and_restored(target: ModuleType) -> None:
    function = patch("free", lambda original: lambda x: original(x) * 10)
    method = patch("Target.method", lambda original: lambda self, x: original(self, x) * 10)
    static = patch("Target.static", lambda original: lambda x: original(x) * 10)
    for one in (function, method, static):
        one.apply()
    assert (target.free(1), Target().method(1), Target.static(1), Target().static(1)) == (10, 20, 30, 30)
    assert all(one.in_place() for one in (function, method, static))
    for one in (function, method, static):
        one.undo()
    assert (target.free(1), Target().method(1), Target.static(1)) == (1, 2, 3)
    assert target.free is free


def test_an_inherited_method_is_removed_again(target: ModuleType) -> None:
    one = patch("Target.inherited", lambda original: lambda self: original(self) + "!")
    with one.applied():
        assert Target().inherited() == "base!"
        assert Base().inherited() == "base"
    assert "inherited" not in vars(Target)
    assert Target().inherited() == "base"


def test_patches_over_one_another_are_taken_back_one_by_one(target: ModuleType) -> None:
    below = patch("free", lambda original: lambda x: original(x) + 1)
    above = patch("free", lambda original: lambda x: original(x) * 10)
    below.apply()
    above.apply()
    assert (target.free(1), below.in_place(), above.in_place()) == (20, False, True)
    with pytest.raises(RuntimeError, match="not in place"):
        below.undo()
    above.undo()
    assert (target.free(1), below.in_place(), above.in_place()) == (2, True, False)
    below.undo()
    assert target.free is free


def test_a_block_inside_another_leaves_the_patch_to_it(target: ModuleType) -> None:
    one = patch("free", lambda original: lambda x: original(x) + 1)
    with one.applied():
        with one.applied():
            assert target.free(1) == 2
        assert target.free(1) == 2
    assert target.free is free


def test_applying_twice_wraps_once(target: ModuleType) -> None:
    one = patch("free", lambda original: lambda x: original(x) + 1)
    one.apply()
    one.apply()
    assert target.free(0) == 1
    one.undo()


def test_a_replacement_by_somebody_else_shows(target: ModuleType) -> None:
    one = patch("free", lambda original: lambda x: original(x) + 1)
    one.apply()
    ours = target.free
    target.free = free  # type: ignore[attr-defined]
    assert not one.in_place()
    assert one.record()["in_place"] is False
    with pytest.raises(RuntimeError, match="not in place"):
        one.undo()
    target.free = ours  # type: ignore[attr-defined]
    one.undo()


def test_a_foreign_version_is_refused(target: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"patch refused: .*checked for pytest <1, found"):
        patch("free", lambda original: original, holds_for="<1").apply()
    assert target.free is free


def test_a_changed_signature_is_refused(target: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="parameters must start with"):
        patch("free", lambda original: original, parameters=("y",)).apply()


def test_record_says_what_and_why(target: ModuleType) -> None:
    one = patch("free", lambda original: lambda x: x)
    with one.applied():
        record = one.record()
    assert record["symbol"] == "samebits_patch_target:free"
    assert record["why"] == "the test wants it"
    assert record["in_place"] is True
    assert record["version"] == pytest.__version__


def test_census_names_what_is_missing(target: ModuleType) -> None:
    lines = census(
        [
            symbol("free", parameters=("x",)),
            symbol("gone"),
            symbol("Target.gone"),
            symbol("Gone.method"),
            Symbol(path="no_such_module:f", distribution=DISTRIBUTION, holds_for=">=1"),
            Symbol(path="sys:path", distribution="no-such-distribution", holds_for=">=1"),
        ]
    )
    assert len(lines) == 5
    for line, word in zip(lines, ("'gone'", "'gone'", "'Gone'", "'no_such_module'", "not installed"), strict=True):
        assert word in line
