"""Cases of the log-probability: vocabularies from 1 to 152,064, temperatures from 0.2 to 2, every cut of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from samebits.ops.linear import matmul_f32
from samebits.ops.logprob import finish_logp, linear_logp, logprob, lse_state, merge_states
from samebits.ops.logprob.rows import Temperature
from samebits.testing.cases.case import Case, Subject, against_definition
from samebits.testing.cases.inputs import ROWS, generator, grown_by_pieces, inside, randint, randn, with_gradients
from samebits.testing.cases.schedules import forced

OP = "logprob"
TEMPERATURES = (0.2, 0.7, 1.0, 1.3, 2.0)
BIG = ((32_000, 32_000), (151_936, 152_064))  # real and padded columns
SOME = 24  # rows of a big vocabulary that are compared with the definition


def cases() -> Iterator[Case]:
    for vocab, temperature in ((1, 0.7), (2, 1.3), (500, 1.0), (512, 0.7), (3000, 1.3)):
        name = f"logits{vocab}-temperature{temperature}"
        yield against_definition(OP, name, partial(_scores, vocab=vocab, temperature=temperature))
        yield Case(
            OP,
            f"{name}-permuted",
            partial(_states, vocab=vocab, temperature=temperature, permuted=False),
            partial(_states, vocab=vocab, temperature=temperature, permuted=True),
        )
    for temperature in TEMPERATURES:
        yield against_definition(OP, f"head-temperature{temperature}", partial(_fused, temperature=temperature))
        yield Case(
            OP,
            f"head-temperature{temperature}-like-logits",
            partial(_fused_scores, temperature=temperature),
            partial(_scores_of_logits, temperature=temperature),
        )
    yield against_definition(OP, "head-temperature-per-row", partial(_fused, temperature=None))
    yield against_definition(OP, "head-with-bias", _with_bias)
    # kernels hold the gradients of some columns at a time
    yield against_definition(OP, "head-gradients-of-2600-columns", _many_columns)
    for rows in (0, 1):
        yield against_definition(OP, f"head-rows{rows}", partial(_fused, temperature=0.7, rows=rows))
    yield against_definition(OP, "special-logits", _special)
    yield against_definition(OP, "targets-that-are-masked", _masked)
    yield against_definition(OP, "padding-is-poison", _padding)
    yield against_definition(OP, "views-between-poison", _views)
    yield from _big()
    yield from _cuts()
    yield from forced(OP, "logits3000", partial(_scores, vocab=3000, temperature=0.7))
    yield from forced(OP, "head", partial(_fused, temperature=0.7))


def _linear_logp(
    at: Subject,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Temperature,
    bias: Tensor | None = None,
    real: int = 650,
) -> Tensor:
    return linear_logp(hidden, weight, targets, temperature, bias, real_vocab=real, **at.how)


def _logits(rows: int, vocab: int) -> Tensor:
    return 6 * torch.randn(rows, vocab, generator=generator(vocab))


def _targets(rows: int, vocab: int) -> Tensor:
    targets = randint(0, vocab, rows)
    targets[:2] = torch.tensor([0, vocab - 1])[:rows]
    return targets


def _scores(at: Subject, vocab: int, temperature: float, rows: int = ROWS) -> list[Tensor]:
    logits, targets = at.put(_logits(rows, vocab)), at.put(_targets(rows, vocab))
    return [
        logprob(logits, targets, temperature, backend=at.backend),
        lse_state(logits, temperature, backend=at.backend),
    ]


def _states(at: Subject, vocab: int, temperature: float, permuted: bool) -> list[Tensor]:
    logits = _logits(ROWS, vocab)
    if permuted:
        logits = logits[:, torch.randperm(vocab, generator=generator(1))].contiguous()
    return [lse_state(at.put(logits), temperature, backend=at.backend)]


def _temperature(at: Subject, temperature: float | None, rows: int) -> Temperature:
    """One for all rows; None: another in each row."""
    return at.put(torch.tensor(TEMPERATURES).repeat(rows)[:rows]) if temperature is None else temperature


def _head(rows: int = ROWS, columns: int = 700) -> tuple[Tensor, Tensor]:
    return randn(rows, 96), randn(columns, 96, seed=1, scale=0.3)


def _fused(at: Subject, temperature: float | None, rows: int = ROWS) -> Sequence[Tensor]:
    hidden, weight = _head(rows)
    targets, each = at.put(_targets(rows, 650)), _temperature(at, temperature, rows)
    return with_gradients(lambda h, w: _linear_logp(at, h, w, targets, each), at, hidden, weight, weights=1)


def _fused_scores(at: Subject, temperature: float) -> list[Tensor]:
    hidden, weight = (at.put(t) for t in _head())
    return [_linear_logp(at, hidden, weight, at.put(_targets(ROWS, 650)), temperature)]


def _scores_of_logits(at: Subject, temperature: float) -> list[Tensor]:
    hidden, weight = (at.put(t) for t in _head())
    logits = matmul_f32(hidden, weight[:650].contiguous(), arithmetic=at.arithmetic)
    return [logprob(logits, at.put(_targets(ROWS, 650)), temperature, backend=at.backend)]


def _with_bias(at: Subject) -> Sequence[Tensor]:
    hidden, weight = _head()
    targets = at.put(_targets(ROWS, 650))
    return with_gradients(
        lambda h, w, b: _linear_logp(at, h, w, targets, 0.7, b),
        at, hidden, weight, randn(700, seed=3), weights=2,
    )  # fmt: skip


def _many_columns(at: Subject) -> Sequence[Tensor]:
    hidden, weight = randn(ROWS, 24), randn(2600, 24, seed=1)
    targets = at.put(_targets(ROWS, 2600))
    return with_gradients(lambda h, w: _linear_logp(at, h, w, targets, 0.7, real=2600), at, hidden, weight, weights=1)


def _special(at: Subject) -> list[Tensor]:
    """Rows with NaN, infinities, -inf alone, equal and enormous logits, subnormals, both zeros."""
    logits = _logits(ROWS, 130)
    odd = (torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1e-45, -0.0, 6e8)
    for row, value in enumerate(odd):
        logits[row, row::9] = value
        logits[row + 8] = value
        logits[row + 16, :1] = value
    logits[30:40] *= 1e30
    targets = torch.arange(ROWS)[:, None] + torch.arange(3) * 40
    placed, where = at.put(logits), at.put(targets % 130)
    return [
        logprob(placed, where, 0.7, backend=at.backend),
        lse_state(placed, 0.7, backend=at.backend),
    ]


def _masked(at: Subject) -> Sequence[Tensor]:
    """Targets -100, beyond the vocabulary, at the ends of int64: their rows are poison and give nothing."""
    hidden, weight = _head()
    targets = _targets(ROWS, 650)
    odd = torch.tensor([-100, -1, 650, 699, 152_064, -(2**63), 2**63 - 1])
    targets[::3] = odd.repeat(ROWS)[: len(targets[::3])]
    placed, logits = at.put(targets), at.put(_logits(ROWS, 650))
    active = (targets >= 0) & (targets < 650)
    hidden[~active] = torch.nan
    fused = with_gradients(lambda h, w: _linear_logp(at, h, w, placed, 0.7), at, hidden, weight, weights=1)
    return (*fused, logprob(logits, placed, 0.7, backend=at.backend))


def _padding(at: Subject) -> Sequence[Tensor]:
    hidden, weight = _head()
    weight[650:] = torch.nan
    targets = at.put(_targets(ROWS, 650))
    return with_gradients(lambda h, w: _linear_logp(at, h, w, targets, 1.0), at, hidden, weight, weights=1)


def _views(at: Subject) -> list[Tensor]:
    """Logits inside poison, as an engine hands over the real columns of a padded head."""
    logits = at.put(inside(_logits(ROWS, 131), (1, 7)))
    targets = at.put(inside(_targets(ROWS, 131)))
    return [logprob(logits, targets, 1.3, backend=at.backend), lse_state(logits, 1.3, backend=at.backend)]


def _big() -> Iterator[Case]:
    for real, padded in BIG:
        for temperature in (1.0, 0.7):
            name = f"vocabulary{real}-of-{padded}-temperature{temperature}"
            long = temperature != 1.0
            some = partial(_wide, real=real, padded=padded, temperature=temperature, rows=SOME)
            whole = partial(_wide, real=real, padded=padded, temperature=temperature, rows=ROWS)
            tiles = partial(_wide_in_tiles, real=real, padded=padded, temperature=temperature, tile=4001)
            yield against_definition(OP, f"{name}-some-rows", some, long)
            yield Case(OP, f"{name}-tiles", whole, tiles, long=long)


def _wide(at: Subject, real: int, padded: int, temperature: float, rows: int) -> list[Tensor]:
    hidden, weight = at.put(randn(ROWS, 16)[:rows]), at.put(randn(padded, 16, seed=1))
    targets = at.put(_targets(ROWS, real)[:rows])
    return [_linear_logp(at, hidden, weight, targets, temperature, real=real)]


def _wide_in_tiles(at: Subject, real: int, padded: int, temperature: float, tile: int) -> list[Tensor]:
    """The logits in tiles, their states merged from the last to the first."""
    hidden, weight = at.put(randn(ROWS, 16)), at.put(randn(padded, 16, seed=1))[:real]
    targets = at.put(_targets(ROWS, real))
    states, picked = [], torch.zeros(ROWS, device=hidden.device)
    for start in range(0, real, tile):
        logits = matmul_f32(hidden, weight[start : start + tile].contiguous(), arithmetic=at.arithmetic)
        states.append(lse_state(logits, temperature, backend=at.backend))
        own = (targets >= start) & (targets < start + logits.shape[1])
        z = logits.gather(1, torch.where(own, targets - start, 0)[:, None])[:, 0]
        picked = torch.where(own, z / temperature, picked)
    return [finish_logp(merge_states(states[::-1]), picked, backend=at.backend)]


def _cuts() -> Iterator[Case]:
    yield Case(OP, "one-row-at-a-time", partial(_pieces, size=ROWS), partial(_pieces, size=1))
    for ranks in (2, 3, 7):
        yield Case(OP, f"vocabulary-cut-over-{ranks}-ranks", partial(_ranks, ranks=1), partial(_ranks, ranks=ranks))
    for sizes in ((96, 160), (1,) * ROWS):
        name = f"weight-gradient-{len(sizes)}-micro-batches"
        # the groups of sm90 and cdna3 count from the first row of a call
        only = "fma32" if len(sizes) == ROWS else ""
        yield Case(OP, name, partial(_grown, sizes=(ROWS,)), partial(_grown, sizes=sizes), arithmetic=only)


def _pieces(at: Subject, size: int) -> list[Tensor]:
    hidden, weight = (at.put(t) for t in _head())
    targets = at.put(_targets(ROWS, 650))
    leaf = hidden.requires_grad_()
    parts = zip(leaf.split(size), targets.split(size), strict=True)
    y = torch.cat([_linear_logp(at, h, weight, t, 0.7) for h, t in parts])
    y.backward(at.put(torch.randn(ROWS, generator=generator(99))))
    return [y.detach(), leaf.grad if leaf.grad is not None else leaf]


def _ranks(at: Subject, ranks: int) -> list[Tensor]:
    logits = at.put(_logits(ROWS, 500))
    return [merge_states([lse_state(part, 0.7, backend=at.backend) for part in logits.chunk(ranks, 1)])]


def _grown(at: Subject, sizes: Sequence[int]) -> list[Tensor]:
    hidden, targets = at.put(_head()[0]), at.put(_targets(ROWS, 650))

    def step(weight: Tensor, rows: slice) -> Tensor:
        return _linear_logp(at, hidden[rows], weight, targets[rows], 0.7)

    return [grown_by_pieces(step, at, _head()[1], ROWS, sizes)]
