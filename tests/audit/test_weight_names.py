"""The kernel that names weights, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

INTERPRETED = """
import hashlib, torch
import samebits.bits.sha256_triton as kernel
kernel.LEAF = 128
x = torch.arange(128 * 3, dtype=torch.int64).to(torch.uint8)
found = kernel.whole_leaves(x)
assert found.shape == (3, 32)
for at, leaf in enumerate(found):
    assert bytes(leaf.tolist()) == hashlib.sha256(x[at * 128 : (at + 1) * 128].numpy().tobytes()).digest(), at
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed here: `make audit` runs this test beside it",
)
def test_the_kernel_is_sha256() -> None:
    words = ["env", "TRITON_INTERPRET=1", sys.executable, "-c", INTERPRETED]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
