"""The tutorials' commands, run in their order in one folder; what they promise to print is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import samebits

FOLDER = Path(__file__).parents[2] / "docs/tutorials"
NAMES = ("01-first-run", "02-verify-a-bundle", "03-ablate", "05-read-the-report")
BLOCK = re.compile(r"```(sh|text)\n(.*?)```", re.DOTALL)


def steps(text: str) -> Iterator[tuple[str, list[str]]]:
    """(commands, lines that they must print), in order."""
    commands = ""
    for kind, content in BLOCK.findall(text):
        if kind == "sh":
            commands = content
        else:
            yield commands, content.splitlines()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the commands on its path, shared by the tutorials: later ones use what earlier ones made."""
    home = tmp_path_factory.mktemp("tutorials")
    (home / "bin").mkdir()
    for name, module in (("samebits", "-m samebits.cli.main"), ("python", "")):
        command = home / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        command.chmod(0o755)
    return home


def squeezed(text: str) -> str:
    """Without the padding of tables."""
    return re.sub(r"[ \t]+", " ", text)


@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_does_what_it_says(home: Path, name: str) -> None:
    path = f"{home / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(samebits.__file__).parent.parent)}
    found = list(steps((FOLDER / f"{name}.md").read_text(encoding="utf-8")))
    assert found
    for commands, lines in found:
        done = subprocess.run(
            ["bash", "-e", "-c", commands], cwd=home, env=environment, capture_output=True, text=True, timeout=550
        )
        printed = squeezed(done.stdout + done.stderr)
        assert done.returncode == 0, printed
        for line in lines:
            assert squeezed(line) in printed, f"{line!r} is missing in:\n{printed}"


def test_every_tutorial_leads_to_the_next() -> None:
    for name in NAMES:
        for target in re.findall(r"\]\(([\w./-]+\.md)", (FOLDER / f"{name}.md").read_text(encoding="utf-8")):
            assert (FOLDER / target).resolve().is_file(), f"{name} leads to {target}"
