"""Drawings tell the order in which the operators really add."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from samebits.arithmetic.primitives import fold_halves
from samebits.contract import Boundary
from samebits.contract.boundaries import BOUNDARIES
from samebits.contract.drawing import Step, drawing, fold_steps, tree, tree_steps
from samebits.ops.attention.contract import ATTENTION
from samebits.ops.linear import linear_partial
from samebits.ops.linear.contract import LINEAR
from samebits.ops.logprob.contract import LOGPROB
from samebits.ops.rms_norm.contract import RMS_NORM


def along(steps: tuple[Step, ...], parts: torch.Tensor) -> torch.Tensor:
    """The fp32 sum of parts [rows, n] in the order of `steps`."""
    values = list(parts.unbind(1))
    for step in steps:
        for kept, added in step:
            values[kept] = values[kept] + values[added]
    return values[0]


def spread(rows: int, columns: int) -> torch.Tensor:
    """fp32 numbers over many magnitudes, so that another order gives another sum."""
    generator = torch.Generator().manual_seed(5)
    exponents = torch.randint(-12, 12, (rows, columns), generator=generator)
    return torch.randn(rows, columns, generator=generator) * torch.exp2(exponents.float())


@pytest.mark.parametrize("lanes", [1, 2, 64, 128])
def test_the_fold_that_is_drawn_is_the_fold_that_is_computed(lanes: int) -> None:
    parts = spread(256, lanes)
    assert torch.equal(along(fold_steps(lanes), parts), fold_halves(parts))


@pytest.mark.parametrize("segments", [1, 2, 4, 8])
def test_the_tree_that_is_drawn_is_the_tree_that_is_computed(segments: int) -> None:
    x, weight = spread(256, 64).bfloat16(), spread(5, 64).bfloat16()
    width = 64 // segments
    parts = [linear_partial(x[:, at : at + width].contiguous(), weight[:, at : at + width].contiguous())
             for at in range(0, 64, width)]  # fmt: skip
    drawn = along(tree_steps(segments), torch.stack([part.flatten() for part in parts], 1))
    assert torch.equal(drawn, linear_partial(x, weight, segments=segments).flatten())


def test_another_order_would_be_noticed() -> None:
    parts = spread(256, 8)
    assert not torch.equal(along(tree_steps(8), parts), fold_halves(parts))


@pytest.mark.parametrize("boundary", BOUNDARIES, ids=lambda one: one.name)
def test_every_boundary_has_a_drawing_that_fits_a_page(boundary: Boundary) -> None:
    lines = drawing(boundary).splitlines()
    assert lines
    assert max(map(len, lines)) <= 100
    assert all(line == line.rstrip() for line in lines)


CHANGES = {
    "lanes": (RMS_NORM, {"lanes": 32}, "fold 32 to 16"),
    "tile": (ATTENTION, {"tile": 32}, "empty ─ 0–31 ─ 32–63 ─ … ─ 480–511 ─ state 0"),
    "chunk": (ATTENTION, {"chunk": 1024}, "chunk 1   keys 1024–2047"),
    "windows": (LOGPROB, {"windows": 3}, "S = (s0 2^16 + s1) 2^16 + s2;"),
    "window bits": (LOGPROB, {"window_bits": 8}, "8…15"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_drawing_follows_the_constants(name: str) -> None:
    boundary, constants, line = CHANGES[name]
    assert line not in drawing(boundary)
    assert line in drawing(dataclasses.replace(boundary, constants={**boundary.constants, **constants}))


def test_a_tree_joins_neighbours_first() -> None:
    assert tree(["a", "b", "c", "d"], "── y") == [
        "a ──┐           ",
        "    ├─ + ──┐    ",
        "b ──┘      │    ",
        "           ├─ + ── y",
        "c ──┐      │    ",
        "    ├─ + ──┘    ",
        "d ──┘           ",
    ]


def test_a_boundary_without_a_drawing_has_none() -> None:
    assert drawing(dataclasses.replace(LINEAR, name="something_else")) == ""
