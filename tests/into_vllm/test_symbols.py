"""The installed vLLM has every symbol that the integration extends, overrides or calls."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from samebits.into_vllm.patches import COMPILER, CPU_SYMBOLS, PATCHES_BY_GROUP, SYMBOLS
from samebits.into_vllm.wheel_symbols import lacking
from samebits.patching import Symbol, census


@pytest.mark.filterwarnings("ignore")  # vLLM's own imports warn about its dependencies
def test_census() -> None:
    assert len(SYMBOLS) > 20
    assert census((*SYMBOLS, *CPU_SYMBOLS)) == []


def test_every_patch_is_in_the_census() -> None:
    for patches in (*PATCHES_BY_GROUP.values(), (COMPILER,)):
        assert all(patch.symbol in SYMBOLS for patch in patches)


BASE = "class Base:\n    def step(self, x, y): ...\n"
MODULES = {
    "vllm/__init__.py": "from .inner import *\n",
    "vllm/inner.py": f"from .deep import Base as Root\n{BASE}class Child(Base):\n    kind: int = 0\n",
    "vllm/deep.py": f"try:\n    import fast\nexcept ImportError:\n    fast = None\n{BASE}",
}


@pytest.mark.parametrize(
    ("path", "parameters", "problem"),
    [
        ("vllm:Child.step", ("self", "x"), None),
        ("vllm:Root.step", ("self", "x", "y"), None),
        ("vllm.inner:Child.kind", None, None),
        ("vllm.deep:fast", None, None),
        ("vllm:Child.step", ("self", "z"), "parameters are self, x, y"),
        ("vllm:Child.leap", None, "'leap' is not in Child"),
        ("vllm.inner:Other", None, "'Other' is not in vllm.inner"),
        ("vllm.gone:Base", None, "'Base' is not in vllm.gone"),
    ],
)
def test_a_wheel_is_searched_through_imports_and_bases(
    tmp_path: Path, path: str, parameters: tuple[str, ...] | None, problem: str | None
) -> None:
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as file:
        for name, source in MODULES.items():
            file.writestr(name, source)
    wanted = Symbol(path=path, distribution="vllm", holds_for=">=0", parameters=parameters)
    with zipfile.ZipFile(tmp_path / "w.whl") as file:
        found = lacking(file, [wanted])
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0])
