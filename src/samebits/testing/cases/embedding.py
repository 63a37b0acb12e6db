"""Cases of embedding: ids that nobody or another rank owns, vocabularies from 1 to 152,064."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from samebits.ops.embedding import embedding
from samebits.testing.cases.case import Case, Subject, against_definition
from samebits.testing.cases.inputs import ROWS, grown_by_pieces, inside, randint, randn, special, with_gradients
from samebits.testing.cases.schedules import forced

OP = "embedding"


def cases() -> Iterator[Case]:
    for vocab, width in ((1, 72), (2, 72), (40, 72), (32_000, 16), (151_936, 4), (152_064, 4)):
        yield against_definition(OP, f"vocabulary{vocab}", partial(_forward_backward, vocab=vocab, width=width))
    yield against_definition(OP, "start10", partial(_forward_backward, vocab=40, width=72, start=10))
    for tokens in (0, 1, 8192):
        yield against_definition(OP, f"tokens{tokens}", partial(_forward_backward, vocab=50, width=24, tokens=tokens))
    yield against_definition(OP, "ids-that-are-masked", _masked)
    yield against_definition(OP, "special-values", _special)
    yield against_definition(OP, "views-between-poison", _views)
    yield Case(OP, "rows-cut-over-ranks", partial(_ranks, ranks=1), partial(_ranks, ranks=4))
    for sizes in ((96, 160), (1,) * ROWS):
        name = f"weight-gradient-{len(sizes)}-micro-batches"
        yield Case(OP, name, partial(_grown, sizes=(ROWS,)), partial(_grown, sizes=sizes))
    yield from forced(OP, "vocabulary40", partial(_forward_backward, vocab=40, width=72))


def _forward_backward(at: Subject, vocab: int, width: int, start: int = 0, tokens: int = ROWS) -> Sequence[Tensor]:
    # few ids, so that gradients of many tokens meet; the first and the last row, and ids outside the table
    ids = randint(0, min(vocab, 60), tokens) * max(1, vocab // 60) + start
    if tokens > 4:
        ids[:4] = torch.tensor([start, start + vocab - 1, start + vocab, start - 1])
    placed = at.put(ids)
    return with_gradients(
        lambda w: embedding(placed, w, start=start, backend=at.backend), at, randn(vocab, width), weights=1
    )  # fmt: skip


def _masked(at: Subject) -> Sequence[Tensor]:
    """-100, ids beyond the vocabulary and the ends of int64 are never used as an index."""
    ids = randint(0, 40, ROWS)
    ids[::3] = torch.tensor([-100, 40, 152_064, -(2**63), 2**63 - 1]).repeat(ROWS)[: len(ids[::3])]
    placed = at.put(ids)
    return with_gradients(lambda w: embedding(placed, w, backend=at.backend), at, inside(randn(40, 24)), weights=1)


def _special(at: Subject) -> list[Tensor]:
    """A copy keeps the bits of a NaN; a sum that is NaN has those of 0x7fc00000."""
    ids, table, dy = at.put(randint(0, 40, ROWS)), special(40, 24), special(ROWS, 24, seed=7)
    weight = at.put(table).requires_grad_()
    weight.main_grad = at.put(torch.zeros(40, 24))  # type: ignore[attr-defined]
    y = embedding(ids, weight, backend=at.backend)
    y.backward(at.put(dy))
    return [y.detach(), weight.main_grad]  # type: ignore[attr-defined]


def _views(at: Subject) -> list[Tensor]:
    ids, weight = inside(randint(0, 40, ROWS).view(4, 64), (1, 3)), at.put(inside(randn(40, 24)))
    return [embedding(at.put(each), weight, backend=at.backend) for each in (ids, ids.int())]


def _ranks(at: Subject, ranks: int) -> list[Tensor]:
    """Owners' rows are selected: all others give +0, and nothing is summed."""
    ids, weight = at.put(randint(0, 64, ROWS)), at.put(randn(64, 24))
    y = torch.zeros(ROWS, 24, dtype=torch.bfloat16, device=weight.device)
    for rank, part in enumerate(weight.chunk(ranks)):
        start = rank * len(part)
        own = (ids >= start) & (ids < start + len(part))
        y = torch.where(own[:, None], embedding(ids, part.contiguous(), start=start, backend=at.backend), y)
    return [y]


def _grown(at: Subject, sizes: Sequence[int]) -> list[Tensor]:
    ids = at.put(randint(-3, 45, ROWS))

    def step(weight: Tensor, rows: slice) -> Tensor:
        return embedding(ids[rows], weight, backend=at.backend)

    return [grown_by_pieces(step, at, randn(40, 24), ROWS, sizes)]
