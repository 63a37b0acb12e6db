"""Cases of sampling: vocabularies 1 to 32,000, every temperature, greedy with ties, any batch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from samebits.ops.sample import sample_and_logprob
from samebits.testing.cases.case import Case, Subject, against_definition
from samebits.testing.cases.inputs import ROWS, generator, inside, randint
from samebits.testing.cases.schedules import forced

OP = "sample"
TEMPERATURES = (0.0, 0.2, 0.7, 1.0, 1.3, 2.0)


def cases() -> Iterator[Case]:
    for temperature in TEMPERATURES:
        yield against_definition(OP, f"at-temperature{temperature}", partial(_draw, temperature=temperature))
    yield against_definition(OP, "at-temperature-per-row", partial(_draw, temperature=None))
    for vocab, long in ((1, False), (2, False), (32_000, True)):
        yield against_definition(OP, f"logits{vocab}", partial(_draw, temperature=0.7, vocab=vocab), long)
    yield against_definition(OP, "greedy-among-equals", partial(_draw, temperature=0.0, rounded=True))
    yield against_definition(OP, "views-between-poison", _views)
    for size in (1, 100):
        left, right = partial(_draw, temperature=None), partial(_draw, temperature=None, size=size)
        yield Case(OP, f"{size}-rows-at-a-time", left, right)
    yield from forced(OP, "at-temperature-per-row", partial(_draw, temperature=None))


def _seeds() -> Tensor:
    return torch.randint(0, 2**62, (ROWS,), generator=generator(8))


def _draw(
    at: Subject, temperature: float | None, vocab: int = 400, rounded: bool = False, size: int = ROWS
) -> list[Tensor]:
    """Tokens and their log-probabilities; without a temperature another one in each row, 0 included."""
    logits = 3 * torch.randn(ROWS, vocab, generator=generator(vocab))
    each = torch.tensor(TEMPERATURES).repeat(ROWS)[:ROWS] if temperature is None else torch.full((ROWS,), temperature)
    given = at.put(logits.round() if rounded else logits)
    each, seeds, positions = at.put(each), at.put(_seeds()), at.put(randint(0, 50, ROWS))
    parts = (slice(begin, begin + size) for begin in range(0, ROWS, size))
    drawn = [sample_and_logprob(given[p], each[p], seeds[p], positions[p], backend=at.backend) for p in parts]
    return [torch.cat(column) for column in zip(*drawn, strict=True)]


def _views(at: Subject) -> list[Tensor]:
    logits = 3 * torch.randn(ROWS, 400, generator=generator(400))
    arguments = inside(logits, (1, 5)), 0.7, inside(_seeds()), inside(randint(0, 50, ROWS))
    placed, temperature, seeds, positions = arguments
    return list(
        sample_and_logprob(at.put(placed), temperature, at.put(seeds), at.put(positions), backend=at.backend)
    )  # fmt: skip
