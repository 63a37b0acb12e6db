"""Sums over memory of peers, without a GPU: the kernels in Triton's interpreter, one process for each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed here: `make audit` runs these tests beside it")

PROGRAM = Path(__file__).with_name("interpreted_peers.py")
FAULTS = {
    "no wait for values": ("while (missing != 0) & (lost == 0):", "while (missing != missing) & (lost == 0):"),
    "no wait for posts": ("while (seen <= generation) & (lost == 0):", "while (seen != seen) & (lost == 0):"),
    "the own share of another rank": ("own = RANK * stride", "own = (RANKS - 1 - RANK) * stride"),
}


def exit_code(directory: Path, *fault: str) -> int:
    command = [sys.executable, "-W", "ignore", str(PROGRAM), str(directory), *fault]
    try:
        done = subprocess.run(
            command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=90
        )
    except subprocess.TimeoutExpired:
        return -1
    assert done.returncode in (0, 1), done.stderr
    return done.returncode


def test_the_bits_are_those_of_the_tree(tmp_path: Path) -> None:
    assert exit_code(tmp_path) == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(tmp_path: Path, fault: str) -> None:
    assert exit_code(tmp_path, *FAULTS[fault]) == 1
