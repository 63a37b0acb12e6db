"""A backend of another package: announced, chosen, tested by the suite; the examples of docs/conformance.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from samebits.backends import NoBackend, lazy, register, select
from samebits.bits import assert_same
from samebits.ops.swiglu import swiglu

PAGE = Path(__file__).parents[2] / "docs/conformance.md"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's package and what an installer would write about it."""
    folder = tmp_path_factory.mktemp("site")
    text = PAGE.read_text(encoding="utf-8")
    right, wrong = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (points,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    package, metadata = folder / "toy_kernels", folder / "toy_kernels-1.0.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text("")
    (package / "right.py").write_text(right)
    (package / "wrong.py").write_text(wrong)
    lines = [line.replace('"', "") for line in points.splitlines()[1:]]
    (metadata / "entry_points.txt").write_text("\n".join(["[samebits.backends]", *lines]) + "\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-kernels\nVersion: 1.0\n")
    return folder


def suite(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "samebits.testing.conformance", *words]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


def test_a_right_backend_passes_every_case_of_its_op(installed: Path) -> None:
    done = suite(installed, "--backend", "toy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\n\d\d? cases: \d\d? same, 0 DIFFERS, 0 FAILED, 0 refused\n$", done.stdout)
    assert all(" swiglu toy " in line for line in done.stdout.splitlines()[:-1])


def test_a_wrong_backend_is_told_where(installed: Path) -> None:
    done = suite(installed, "--backend", "toy_wrong")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"DIFFERS .* swiglu toy_wrong \S+: output 0: \d+ of \d+ elements differ", done.stdout)


def test_a_registered_module_is_chosen_by_name(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed))
    register("swiglu", "registered", "toy_kernels.right")
    x = torch.randn(256, 34, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert_same(swiglu(x, backend="registered"), swiglu(x))


def test_what_nobody_announced_is_refused() -> None:
    with pytest.raises(NoBackend, match="no backend 'nobody'; it has cpu, reference, triton"):
        swiglu(torch.zeros(2, 4).bfloat16(), backend="nobody")


def test_a_backend_without_its_foundation_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = tmp_path / "room_without_floor"
    room.mkdir()
    (room / "__init__.py").touch()
    (room / "cpu.py").write_text("from samebits import _floor\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="_floor"):
        lazy("room_without_floor", "cpu")["cpu"]
    monkeypatch.setitem(select._NEEDS, "samebits._floor", "the floor")
    with pytest.raises(NoBackend, match="needs the floor, which is not installed here"):
        lazy("room_without_floor", "cpu")["cpu"]
