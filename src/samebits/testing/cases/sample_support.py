"""Cases of supports: every limit alone and together, ties, few finite logits; draws, scores and gradients over them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from samebits.ops.linear import matmul_f32
from samebits.ops.sample_support import Kept, Limits, kept_linear_logp, kept_logprob, sample_kept, sample_support
from samebits.testing.cases.case import DEFINITION, Case, Subject, against_definition
from samebits.testing.cases.inputs import ROWS, generator, inside, randint, randn, with_gradients
from samebits.testing.cases.schedules import forced

OP = "sample_support"
LIMITS: dict[str, dict[str, float]] = {
    "top-k20": {"top_k": 20},
    "top-p0.9": {"top_p": 0.9},
    "min-p0.05": {"min_p": 0.05},
    "top-k20-top-p0.9": {"top_k": 20, "top_p": 0.9},
    "all-three": {"top_k": 50, "top_p": 0.95, "min_p": 0.01},
}


def cases() -> Iterator[Case]:
    for name, limits in LIMITS.items():
        yield against_definition(OP, name, partial(_drawn, limits=limits))
    for vocab in (1, 2):
        yield against_definition(OP, f"vocabulary{vocab}", partial(_drawn, limits=LIMITS["all-three"], vocab=vocab))
    yield against_definition(OP, "limits-per-row", partial(_drawn, limits=None))
    yield against_definition(OP, "ties", partial(_drawn, limits=None, rounded=True))
    yield against_definition(OP, "gradients", _gradients)
    whole = partial(_drawn, limits=None)
    for size in (1, 100):
        yield Case(OP, f"{size}-rows-at-a-time", whole, partial(_drawn, limits=None, size=size))
    yield against_definition(OP, "views-between-poison", partial(_drawn, limits=None, margins=(1, 5)))
    yield from forced(OP, "limits-per-row", whole)
    yield Case(OP, "all-kept-is-no-support", partial(_drawn, limits={"top_k": 400}), _unlimited)


def _logits(vocab: int, rounded: bool) -> Tensor:
    logits = 3 * torch.randn(ROWS, vocab, generator=generator(vocab))
    logits[::7, vocab // 2 + 1 :] = -torch.inf
    logits[1::7] = 0.25
    return logits.round() if rounded else logits


def _keys(at: Subject) -> tuple[Tensor, Tensor]:
    return at.put(torch.randint(0, 2**62, (ROWS,), generator=generator(8))), at.put(randint(0, 50, ROWS))


def _mixed() -> Limits:
    """Every combination of limits, row after row; some rows have none."""
    kinds = torch.arange(ROWS) % 8
    top_p = torch.rand(ROWS, generator=generator(5)).clamp_min(0.01)
    min_p = torch.rand(ROWS, generator=generator(6)) ** 3
    return Limits(
        randint(1, 60, ROWS, seed=4) * (kinds & 1),
        torch.where(kinds & 2 > 0, top_p, 1.0),
        torch.where(kinds & 4 > 0, min_p, 0.0),
    )


def _drawn(
    at: Subject,
    limits: dict[str, float] | None,
    vocab: int = 400,
    rounded: bool = False,
    size: int = ROWS,
    margins: tuple[int, ...] = (),
) -> list[Tensor]:
    """Counts and ids of the supports, tokens drawn from them, and the log-probabilities of these and of others."""
    logits, each = at.put(inside(_logits(vocab, rounded), margins)), at.put(torch.linspace(0.2, 2, ROWS))
    bounds = _mixed() if limits is None else Limits.of(ROWS, **limits)  # type: ignore[arg-type]
    others, (seeds, positions) = at.put(randint(0, vocab, ROWS, seed=7)), _keys(at)
    parts: list[list[Tensor]] = []
    for begin in range(0, ROWS, size):
        rows = slice(begin, begin + size)
        here = Limits(bounds.top_k[rows], bounds.top_p[rows], bounds.min_p[rows])
        kept = sample_support(logits[rows], each[rows], here, backend=at.backend)
        tokens, logp = sample_kept(logits[rows], each[rows], seeds[rows], positions[rows], kept, backend=at.backend)
        targets = torch.stack([tokens, others[rows]], dim=1)
        scores = kept_logprob(logits[rows], targets, each[rows], kept, backend=at.backend)
        parts.append([kept.counts, kept.ids, tokens, logp, scores])
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _unlimited(at: Subject) -> list[Tensor]:
    """What `_drawn` gives where everything finite is kept, from ops that know no support but the list of all."""
    logits, each = at.put(_logits(400, False)), at.put(torch.linspace(0.2, 2, ROWS))
    finite = [row.isfinite().nonzero()[:, 0].tolist() for row in logits]
    kept = Kept.of(finite)
    free = Kept.all(ROWS)
    tokens, logp = sample_kept(logits, each, *_keys(at), free, backend=at.backend)
    targets = torch.stack([tokens, at.put(randint(0, 400, ROWS, seed=7))], dim=1)
    scores = kept_logprob(logits, targets, each, free, backend=at.backend)
    return [kept.counts, kept.ids, tokens, logp, scores]


def _gradients(at: Subject) -> list[Tensor]:
    """Log-probabilities from hidden states, with the gradients of hidden states, weight and bias."""
    hidden, weight, bias = randn(ROWS, 48), randn(600, 48, seed=1, scale=0.3), randn(600, seed=2)
    each = torch.linspace(0.5, 6, ROWS)
    logits = matmul_f32(hidden, weight, bias)
    kept = sample_support(logits, each, Limits.of(ROWS, top_k=560, top_p=0.9))
    targets, _ = sample_kept(logits, each, *_keys(DEFINITION), kept)
    targets, each = at.put(targets), at.put(each)

    def score(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return kept_linear_logp(h, w, targets, kept, each, b, backend=at.backend, arithmetic=at.arithmetic)

    return list(with_gradients(score, at, hidden, weight, bias, weights=2))
