"""The tutorial's commands do what it says: exit codes and the lines of output that it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/tutorials/04-locate.md"
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.M | re.S)
CODE = re.compile(r"# exit code (\d+)$", re.M)


def steps() -> list[tuple[str, int, list[str]]]:
    """Each block of commands, the exit code that its last command must have, and the lines that it must print."""
    found: list[tuple[str, int, list[str]]] = []
    for kind, body in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if kind == "sh":
            codes = CODE.findall(body)
            found.append((body, int(codes[-1]) if codes else 0, []))
        else:
            found[-1][2].extend(body.splitlines())
    return found


def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in (("samebits", "-m samebits.cli.main"), ("python", "")):
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        script.chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "200"}
    assert len(steps()) >= 5
    beyond = ("samebits locate runs/mixed --token 100000", 2, ["response tokens 0 to", "got 100000"])
    for commands, code, lines in [*steps(), beyond]:
        ran = subprocess.run(
            ["bash", "-c", commands], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        said = ran.stdout + ran.stderr
        assert ran.returncode == code, f"{commands}\n{said}"
        for line in lines:
            assert line in said, f"{commands}\ndid not print {line!r}:\n{said}"
