"""The LM head over supports, without a GPU: the kernel in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed here: `make audit` runs these tests beside it")

PROGRAM = Path(__file__).with_name("interpreted_kept_head.py")


def test_the_bits_are_the_definitions_and_a_fault_shows(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(PROGRAM), str(tmp_path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [found.pop(name) for name in ("fma32", "sm90", "two ranks")] == [[], [], []]
    assert len(found) == 5
    assert all(found.values()), found
