"""Launches are a function of the shape, and fit the cards; no GPU is needed."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from samebits.ops.linear.launch import LDS_BYTES, Launch, for_amd, launch, vendor_is_faster, vendor_plan

ROWS = [1, 2, 7, 16, 17, 32, 64, 65, 128, 200, 512, 1000, 4096, 8192]
WEIGHTS = [(768, 4096), (1536, 4096), (4096, 512), (4096, 12288), (6144, 4096), (24576, 4096), (151_936, 4096)]
CHOICES = [
    (m, n, k, options)
    for m, (n, k) in itertools.product(ROWS, WEIGHTS)
    for options in ({}, {"segments": 8}, {"tma": False}, {"keep_c": True})
]
H200_BYTES = 227 * 1024


def input_bytes(how: Launch) -> int:
    """Of one stage."""
    return 2 * (how.block_m + how.block_n) * how.block_k


@pytest.mark.parametrize(("m", "n", "k", "options"), CHOICES)
def test_a_launch_fits(m: int, n: int, k: int, options: dict) -> None:
    how = launch(m, n, k, **options)
    assert how == launch(m, n, k, **options)
    assert input_bytes(how) * how.stages * how.per_sm <= H200_BYTES
    assert input_bytes(for_amd(how)) <= LDS_BYTES // 2
    if options.get("tma") is False:
        assert how.kernel == "any"
    if options.get("keep_c"):
        assert not how.swapped
        assert not how.split
    if options.get("segments") and how.kernel == "any":
        assert how.split
    if how.kernel == "tile" and "segments" in options:
        assert k // options["segments"] % how.block_k == 0


def test_a_launch_can_be_printed() -> None:
    command = [sys.executable, "-m", "samebits.ops.linear.launch", "8192", "4096", "4096"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [str(launch(8192, 4096, 4096)), "the vendor's product, where certified: True"]


def test_a_launch_without_its_sizes_names_what_is_wanted() -> None:
    command = [sys.executable, "-m", "samebits.ops.linear.launch", "8192"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1].endswith("arguments are required: N, K")) == (2, True)


def test_the_vendor_is_wanted_where_it_is_faster_and_nowhere_else() -> None:
    plan = vendor_plan([1, 64, 128, 512, 8192, 512], [(6144, 4096), (4096, 12288), (6144, 4096)])
    assert plan == [(128, 4096, 12288), (512, 4096, 12288), *((m, 6144, 4096) for m in (128, 512, 8192))]
    assert not vendor_is_faster(512, 6144, 4096, segments=2)
