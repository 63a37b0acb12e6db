"""Cases of rotary: head widths 2 to 256, positions up to 32k in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from samebits.ops.rotary import rotary, rotary_table
from samebits.testing.cases.case import Case, Subject, against_definition
from samebits.testing.cases.inputs import ROWS, inside, randint, randn, special, with_gradients
from samebits.testing.cases.schedules import forced

OP = "rotary"
POSITIONS = 32768


def cases() -> Iterator[Case]:
    for width in (2, 6, 32, 80, 128, 256):
        yield against_definition(OP, f"width{width}", partial(_forward_backward, width=width))
    for rows in (0, 1):
        yield against_definition(OP, f"rows{rows}", partial(_forward_backward, width=64, rows=rows))
    # a last bit of fp32 shows in one of some 10^5 outputs rounded to bf16, so these cases are large
    yield against_definition(OP, "rows4096", partial(_forward_backward, width=64, rows=4096, heads=6))
    yield against_definition(OP, "rows8192", partial(_forward_backward, width=64, rows=8192, heads=2))
    yield against_definition(OP, "special-values", _special)
    yield against_definition(OP, "views-between-poison", _views)
    yield Case(OP, "one-token-at-a-time", partial(_pieces, size=ROWS), partial(_pieces, size=1))
    yield Case(OP, "one-head-at-a-time", partial(_heads, size=6), partial(_heads, size=1))
    yield from forced(OP, "width128", partial(_forward_backward, width=128))


@cache
def _table(width: int) -> tuple[Tensor, Tensor]:
    return rotary_table(width, 10_000.0, POSITIONS)


def _positions(rows: int) -> Tensor:
    """Ascending in the first half, then any order, the ends of the table included."""
    positions = torch.cat([torch.arange(rows // 2), randint(0, POSITIONS, rows - rows // 2)])
    positions[-2:] = torch.tensor([0, POSITIONS - 1])[: min(rows, 2)]
    return positions


def _forward_backward(at: Subject, width: int, rows: int = ROWS, heads: int = 3) -> Sequence[Tensor]:
    cos, sin = (at.put(t) for t in _table(width))
    positions = at.put(_positions(rows))
    return with_gradients(
        lambda x: rotary(x, positions, cos, sin, backend=at.backend), at, randn(rows, heads, width)
    )  # fmt: skip


def _special(at: Subject) -> list[Tensor]:
    cos, sin = (at.put(t) for t in _table(64))
    x = special(ROWS * 2, 64).view(ROWS, 2, 64)
    return [rotary(at.put(x), at.put(_positions(ROWS)), cos, sin, backend=at.backend)]


def _views(at: Subject) -> list[Tensor]:
    """Heads cut out of a packed projection; positions of either integer type."""
    cos, sin = (at.put(inside(t)) for t in _table(80))
    x, positions = inside(randn(ROWS, 5, 80), (1, 2, 8)), inside(_positions(ROWS))
    return [rotary(at.put(x), at.put(p), cos, sin, backend=at.backend) for p in (positions, inside(positions.int()))]


def _pieces(at: Subject, size: int) -> list[Tensor]:
    cos, sin = (at.put(t) for t in _table(64))
    x, positions = at.put(randn(ROWS, 4, 64)), at.put(_positions(ROWS))
    pieces = zip(x.split(size), positions.split(size), strict=True)
    return [torch.cat([rotary(a, p, cos, sin, backend=at.backend) for a, p in pieces])]


def _heads(at: Subject, size: int) -> list[Tensor]:
    cos, sin = (at.put(t) for t in _table(64))
    x, positions = at.put(randn(ROWS, 6, 64)), at.put(_positions(ROWS))
    return [torch.cat([rotary(part, positions, cos, sin, backend=at.backend) for part in x.split(size, dim=1)], 1)]
