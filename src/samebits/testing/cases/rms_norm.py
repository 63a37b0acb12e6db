"""Cases of rms_norm: widths around the 128 lanes, rows from 0 to 8192, every cut of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from samebits.ops.rms_norm import BACKENDS, add_rms_norm, rms_norm
from samebits.testing.cases.case import Case, Subject, against_definition, implementation
from samebits.testing.cases.inputs import ROWS, gain, grown_by_pieces, inside, randn, special, with_gradients
from samebits.testing.cases.schedules import forced

OP = "rms_norm"
EPS = 1e-6


def cases() -> Iterator[Case]:
    for width in (1, 5, 64, 127, 128, 1000, 4096):
        long = width == 4096
        yield against_definition(OP, f"width{width}", partial(_forward, width=width), long)
        yield against_definition(OP, f"width{width}-gradients", partial(_backward, width=width), long)
    for rows in (0, 1, 7):
        yield against_definition(OP, f"rows{rows}", partial(_forward, rows=rows, width=200))
        yield against_definition(OP, f"rows{rows}-gradients", partial(_backward, rows=rows, width=200))
    # dx is rounded to bf16, which hides a last bit of fp32 in all but one of some 10^5 elements: a large case
    yield against_definition(OP, "rows4096-gradients", partial(_backward, rows=4096, width=256))
    yield against_definition(OP, "rows8192", partial(_forward, rows=8192, width=96))
    yield against_definition(OP, "special-values", _special)
    yield against_definition(OP, "special-values-gradients", _special_backward)
    yield against_definition(OP, "views-between-poison", _views)
    for rows, width, size in ((ROWS, 64, 1), (ROWS, 127, 1), (ROWS, 1000, 1), (4096, 256, 255), (8192, 200, 4096)):
        yield Case(
            OP,
            f"rows{rows}-width{width}-{size}-at-a-time",
            partial(_batch, rows=rows, width=width, size=rows),
            partial(_batch, rows=rows, width=width, size=size),
        )
    for sizes in ((96, 160), (1,) * ROWS):
        name = f"weight-gradient-{len(sizes)}-micro-batches"
        yield Case(OP, name, partial(_grown, sizes=(ROWS,)), partial(_grown, sizes=sizes))
    yield from forced(OP, "width1000", partial(_forward, width=1000))
    yield from forced(OP, "width1000-gradients", partial(_backward, width=1000))


def _forward(at: Subject, width: int, rows: int = ROWS) -> list[Tensor]:
    x, residual, weight = at.put(randn(rows, width)), at.put(randn(rows, width, seed=1)), at.put(gain(width))
    # 1 / root mean square in fp32: the rounded outputs would hide how it was summed
    scale = implementation(OP, BACKENDS, at, x).forward(x, residual, weight, EPS)[2]
    both = add_rms_norm(x, residual, weight, EPS, backend=at.backend)
    return [rms_norm(x, weight, EPS, backend=at.backend), *both, scale]


def _backward(at: Subject, width: int, rows: int = ROWS) -> list[Tensor]:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, EPS, backend=at.backend)

    def both(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return torch.cat(add_rms_norm(x, residual, weight, EPS, backend=at.backend))

    x, residual, weight = randn(rows, width), randn(rows, width, seed=1), gain(width)
    plain = with_gradients(norm, at, x, weight, weights=1)
    return [*plain, *with_gradients(both, at, x, residual, weight, weights=1)]


def _special(at: Subject) -> list[Tensor]:
    x, residual, weight = special(ROWS, 130), special(ROWS, 130, seed=9), special(2, 130, seed=5)[0]
    both = add_rms_norm(at.put(x), at.put(residual), at.put(weight), EPS, backend=at.backend)
    return [rms_norm(at.put(x), at.put(gain(130)), EPS, backend=at.backend), *both]


def _special_backward(at: Subject) -> Sequence[Tensor]:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, EPS, backend=at.backend)

    return with_gradients(norm, at, special(ROWS, 130), gain(130), weights=1)


def _views(at: Subject) -> list[Tensor]:
    """The heads of a packed projection, as QK-norm gets them, and the weight, all inside poison."""
    x, residual = inside(randn(ROWS, 6, 64), (1, 1, 8)), inside(randn(ROWS, 6, 64, seed=1), (0, 2, 16))
    weight = at.put(inside(gain(64)))
    both = add_rms_norm(at.put(x), at.put(residual), weight, EPS, backend=at.backend)
    return [rms_norm(at.put(x), weight, EPS, backend=at.backend), *both]


def _batch(at: Subject, rows: int, width: int, size: int) -> list[Tensor]:
    x, residual, weight = at.put(randn(rows, width)), at.put(randn(rows, width, seed=1)), at.put(gain(width))
    pieces = zip(x.split(size), residual.split(size), strict=True)
    parts = [add_rms_norm(a, b, weight, EPS, backend=at.backend) for a, b in pieces]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _grown(at: Subject, sizes: Sequence[int]) -> list[Tensor]:
    x = at.put(randn(ROWS, 130))

    def step(weight: Tensor, rows: slice) -> Tensor:
        return rms_norm(x[rows], weight, EPS, backend=at.backend)

    return [grown_by_pieces(step, at, gain(130), ROWS, sizes)]
