"""Cases of linear: rows from 0 to 8192, odd K and N, segments, every cut of rows, columns and tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from samebits.ops.linear import dgrad, linear, linear_partial, matmul_f32, wgrad
from samebits.testing.cases.case import Case, Subject, against_definition
from samebits.testing.cases.inputs import (
    ROWS,
    generator,
    grown_by_pieces,
    inside,
    randint,
    randn,
    special,
    with_gradients,
)
from samebits.testing.cases.schedules import forced

OP = "linear"
SHAPES = (  # rows, outputs, width, segments
    (ROWS, 100, 128, 1),
    (ROWS, 33, 67, 1),
    (ROWS, 64, 256, 4),
    (ROWS, 1, 1, 1),
    (ROWS, 19, 300, 1),
    (0, 40, 64, 2),
    (1, 300, 200, 2),
    (5, 300, 200, 2),
    (16, 257, 130, 1),
    (17, 64, 520, 8),
    (1000, 24, 48, 1),
)
BIG = 8192  # rows


def cases() -> Iterator[Case]:
    for rows, outs, width, segments in SHAPES:
        shape = f"rows{rows}-outputs{outs}-inner{width}-segments{segments}"
        forward = partial(_forward, rows=rows, outs=outs, width=width, segments=segments)
        backward = partial(_backward, rows=rows, outs=outs, width=width, segments=segments)
        yield against_definition(OP, shape, forward)
        yield against_definition(OP, f"{shape}-gradients", backward)
    yield against_definition(OP, "special-values", _special)
    yield against_definition(OP, "special-values-gradients", _special_backward)
    yield against_definition(OP, "views-between-poison", _views)
    for rows, outs, width, long in ((4096, 160, 384, False), (BIG, 96, 520, False), (BIG, 1030, 1031, True)):
        name = f"rows{rows}-outputs{outs}-inner{width}"
        yield Case(
            OP,
            f"{name}-some-rows",
            partial(_some_rows, rows=rows, outs=outs, width=width),
            partial(_only_rows, rows=rows, outs=outs, width=width),
            by_definition=True,
            long=long,
        )
        yield Case(
            OP,
            f"{name}-any-batch",
            partial(_cut_rows, rows=rows, outs=outs, width=width, sizes=(rows,)),
            partial(_cut_rows, rows=rows, outs=outs, width=width, sizes=(1, 2, 13, 16, 64, 257, 1000)),
            long=long,
        )
    yield from _cuts()
    yield from forced(OP, "inner520", partial(_forward, rows=ROWS, outs=100, width=520, segments=2))
    yield from forced(OP, "inner520-gradients", partial(_backward, rows=ROWS, outs=100, width=520, segments=2))
    yield from forced(OP, "rows5", partial(_forward, rows=5, outs=300, width=520, segments=1))


def _forward(at: Subject, rows: int, outs: int, width: int, segments: int) -> list[Tensor]:
    x, weight, bias = at.put(randn(rows, width)), at.put(randn(outs, width, seed=1)), at.put(randn(outs, seed=2))
    rounded = linear(x, weight, bias, segments=segments, **at.how)
    return [
        rounded,
        linear_partial(x, weight, segments=segments, **at.how),
        matmul_f32(x, weight, bias, **at.how),
    ]


def _backward(at: Subject, rows: int, outs: int, width: int, segments: int) -> list[Tensor]:
    x, weight, bias = randn(rows, width), randn(outs, width, seed=1), randn(outs, seed=2)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear(x, weight, bias, segments, **at.how)

    gradients = with_gradients(function, at, x, weight, bias, weights=2)
    dy = at.put(randn(rows, outs, seed=4))
    return [*gradients, dgrad(dy, at.put(weight), torch.float32, **at.how)]


def _special(at: Subject) -> list[Tensor]:
    x, weight, bias = at.put(special(ROWS, 40)), at.put(special(24, 40, seed=11)), at.put(special(2, 24, seed=5)[0])
    rounded = [linear(x, weight, bias, segments, **at.how) for segments in (1, 2)]
    return [*rounded, linear_partial(x, weight, segments=2, **at.how)]


def _special_backward(at: Subject) -> list[Tensor]:
    x, weight, dy = special(ROWS, 40), special(24, 40, seed=11), at.put(special(ROWS, 24, seed=21))
    buffer = at.put(torch.zeros(24, 40))
    wgrad(dy, at.put(x), buffer, **at.how)
    return [dgrad(dy, at.put(weight), **at.how), buffer]


def _views(at: Subject) -> list[Tensor]:
    """Rows, weight and gradients cut out of larger tensors; the buffer between guards."""
    x, weight = at.put(inside(randn(ROWS, 67), (1, 5))), at.put(inside(randn(33, 67, seed=1), (2, 7)))
    bias, dy = at.put(inside(randn(33, seed=2))), at.put(inside(randn(ROWS, 33, seed=3), (1, 9)))
    wide = at.put(inside(torch.randn(33, 67, generator=generator(98)), (1, 0)))
    wgrad(dy, x, wide, **at.how)
    block = wide.as_strided((35, 67), (67, 1), 0)
    return [linear(x, weight, bias, **at.how), dgrad(dy, weight, **at.how), block]


def _some(rows: int) -> Tensor:
    """The first, the last and other rows, ROWS of them."""
    return torch.cat([torch.tensor([0, rows - 1]), randint(0, rows, ROWS - 2)])


def _some_rows(at: Subject, rows: int, outs: int, width: int) -> list[Tensor]:
    y = matmul_f32(at.put(randn(rows, width)), at.put(randn(outs, width, seed=1)), **at.how)
    return [y[at.put(_some(rows))][:, -100:].contiguous()]


def _only_rows(at: Subject, rows: int, outs: int, width: int) -> list[Tensor]:
    x, weight = randn(rows, width)[_some(rows)], randn(outs, width, seed=1)[-100:].contiguous()
    return [matmul_f32(at.put(x), at.put(weight), **at.how)]


def _cut_rows(at: Subject, rows: int, outs: int, width: int, sizes: Sequence[int]) -> list[Tensor]:
    """The batch in pieces of `sizes`, then what is left."""
    x, weight = at.put(randn(rows, width)), at.put(randn(outs, width, seed=1))
    pieces = x.split([*sizes, rows - sum(sizes)])
    return [torch.cat([matmul_f32(piece, weight, **at.how) for piece in pieces])]


def _cuts() -> Iterator[Case]:
    for rows, outs, width, segments in SHAPES[:4]:
        name = f"rows{rows}-outputs{outs}-inner{width}-segments{segments}-one-row-at-a-time"
        whole = partial(_one_batch, rows=rows, outs=outs, width=width, segments=segments, size=rows)
        single = partial(_one_batch, rows=rows, outs=outs, width=width, segments=segments, size=1)
        yield Case(OP, name, whole, single)
    yield Case(OP, "outputs-cut-over-ranks", partial(_column_parallel, ranks=1), partial(_column_parallel, ranks=3))
    for ranks in (2, 4, 8):
        name = f"width-cut-over-{ranks}-ranks"
        yield Case(OP, name, partial(_row_parallel, ranks=1), partial(_row_parallel, ranks=ranks))
    for sizes in ((96, 160), (1,) * ROWS):
        name = f"weight-gradient-{len(sizes)}-micro-batches"
        # the groups of sm90 and cdna3 count from the first row of a call
        only = "fma32" if len(sizes) == ROWS else ""
        yield Case(OP, name, partial(_grown, sizes=(ROWS,)), partial(_grown, sizes=sizes), arithmetic=only)
    yield Case(
        OP,
        "weight-gradient-any-padding",
        partial(_packed, padding=0),
        partial(_packed, padding=3),
        # elsewhere padding moves rows into other groups
        arithmetic="fma32",
    )
    yield Case(OP, "row-gradients-any-batch", partial(_row_gradients, size=ROWS), partial(_row_gradients, size=3))


def _one_batch(at: Subject, rows: int, outs: int, width: int, segments: int, size: int) -> list[Tensor]:
    x, weight = at.put(randn(rows, width)), at.put(randn(outs, width, seed=1))
    return [torch.cat([linear_partial(part, weight, segments, **at.how) for part in x.split(size)])]


def _column_parallel(at: Subject, ranks: int) -> list[Tensor]:
    x, weight, bias = at.put(randn(ROWS, 130)), at.put(randn(99, 130, seed=1)), at.put(randn(99, seed=2))
    owned = zip(weight.chunk(ranks), bias.chunk(ranks), strict=True)
    return [torch.cat([matmul_f32(x, w, b, **at.how) for w, b in owned], dim=1)]


def _row_parallel(at: Subject, ranks: int) -> list[Tensor]:
    """Eight segments: each rank computes the subtree over its own ones, and the ranks finish the tree."""
    x, weight = at.put(randn(ROWS, 8 * 30)), at.put(randn(50, 8 * 30, seed=1))
    owned = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True)
    level = [linear_partial(a, b, segments=8 // ranks, **at.how) for a, b in owned]
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    return level


def _grown(at: Subject, sizes: Sequence[int]) -> list[Tensor]:
    x = at.put(randn(ROWS, 67))

    def by_weight(weight: Tensor, rows: slice) -> Tensor:
        return linear(x[rows], weight, **at.how)

    def by_bias(bias: Tensor, rows: slice) -> Tensor:
        return linear(x[rows], at.put(randn(33, 67, seed=1)), bias, **at.how)

    weight, bias = randn(33, 67, seed=1), randn(33, seed=2)
    return [grown_by_pieces(by_weight, at, weight, ROWS, sizes), grown_by_pieces(by_bias, at, bias, ROWS, sizes)]


def _packed(at: Subject, padding: int) -> list[Tensor]:
    """Sequences of 32 rows, each followed by rows of padding: whatever they hold, their dy is zero."""
    x, dy = randn(ROWS, 67).view(-1, 32, 67), randn(ROWS, 33, seed=1).view(-1, 32, 33)
    rest = randn(len(x), padding, 67, seed=2), torch.zeros(len(x), padding, 33, dtype=dy.dtype)
    x, dy = (torch.cat([rows, more], dim=1).flatten(0, 1) for rows, more in zip((x, dy), rest, strict=True))
    buffer = at.put(randn(33, 67, seed=3).float())
    wgrad(at.put(dy), at.put(x), buffer, **at.how)
    return [buffer]


def _row_gradients(at: Subject, size: int) -> list[Tensor]:
    dy, weight = at.put(randn(ROWS, 100)), at.put(randn(100, 67, seed=1))
    return [torch.cat([dgrad(part, weight, torch.float32, **at.how) for part in dy.split(size)])]
