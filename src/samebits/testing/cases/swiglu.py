"""Cases of swiglu: widths that are no multiple of any vector, rows from 0 to 8192."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from samebits.ops.swiglu import swiglu
from samebits.testing.cases.case import Case, Subject, against_definition
from samebits.testing.cases.inputs import ROWS, inside, randn, special, with_gradients
from samebits.testing.cases.schedules import forced

OP = "swiglu"


def cases() -> Iterator[Case]:
    for width in (1, 17, 384):
        yield against_definition(OP, f"width{width}", partial(_forward_backward, width=width))
    for rows in (0, 1):
        yield against_definition(OP, f"rows{rows}", partial(_forward_backward, width=40, rows=rows))
    # a last bit of fp32 shows in one of some 10^5 outputs rounded to bf16, so these cases are large
    yield against_definition(OP, "width300", partial(_forward_backward, width=300, rows=4096))
    yield against_definition(OP, "rows8192", partial(_forward_backward, width=48, rows=8192))
    yield against_definition(OP, "special-values", _special)
    yield against_definition(OP, "views-between-poison", _views)
    yield Case(OP, "one-row-at-a-time", partial(_pieces, size=ROWS), partial(_pieces, size=1))
    yield Case(OP, "columns-cut-over-ranks", partial(_columns, ranks=1), partial(_columns, ranks=4))
    yield from forced(OP, "width384", partial(_forward_backward, width=384))


def _forward_backward(at: Subject, width: int, rows: int = ROWS) -> Sequence[Tensor]:
    return with_gradients(lambda x: swiglu(x, backend=at.backend), at, randn(rows, 2 * width, scale=4.0))


def _special(at: Subject) -> Sequence[Tensor]:
    return with_gradients(lambda x: swiglu(x, backend=at.backend), at, special(ROWS, 2 * 130))


def _views(at: Subject) -> list[Tensor]:
    return [swiglu(at.put(inside(randn(ROWS, 2 * 70, scale=4.0), (1, 11))), backend=at.backend)]


def _pieces(at: Subject, size: int) -> list[Tensor]:
    x = at.put(randn(ROWS, 2 * 100, scale=4.0))
    return [torch.cat([swiglu(part, backend=at.backend) for part in x.split(size)])]


def _columns(at: Subject, ranks: int) -> list[Tensor]:
    gate, up = at.put(randn(ROWS, 2 * 96, scale=4.0)).chunk(2, dim=1)
    own = [torch.cat(pair, 1) for pair in zip(gate.chunk(ranks, 1), up.chunk(ranks, 1), strict=True)]
    return [torch.cat([swiglu(part, backend=at.backend) for part in own], 1)]
