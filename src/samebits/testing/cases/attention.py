"""Cases of attention: packed against the definition, and packed against every way of serving from pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from samebits.ops.attention import BACKENDS, attention, paged_attention, write_kv
from samebits.testing.cases.case import DEFINITION, Case, Subject, against_definition, implementation
from samebits.testing.cases.inputs import ROWS, generator, inside, randint, special, with_gradients
from samebits.testing.cases.schedules import forced
from samebits.testing.cases.serving import Packed, Serving, offsets, packed, serve

OP = "attention"
Shape = tuple[tuple[int, ...], int, int, int]

SHAPES: tuple[Shape, ...] = (  # lengths, query heads, kv heads, head_dim
    ((1, 150, 64, 41), 4, 2, 64),
    ((600,), 2, 1, 32),
    ((90, 0, 20, 1, 146), 4, 1, 80),
    ((0, 256, 0), 16, 1, 64),
    ((256,), 1, 1, 128),
    ((200, 56), 2, 1, 256),
    ((130, 126), 5, 5, 96),
    ((1100,), 2, 1, 32),
)
PAGES = ((1, 64), (3, 40), (16, 97), (64, 64), (256, 130))  # page size, tokens of a piece


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        name = _name(*shape)
        yield against_definition(OP, name, partial(_forward, shape=shape))
        if max(shape[0]) <= 256:
            yield against_definition(OP, f"{name}-gradients", partial(_backward, shape=shape))
    yield against_definition(OP, "special-values", _special)
    yield against_definition(OP, "views-between-poison", _views)
    yield against_definition(OP, "rows-of-a-rank", _some_rows_of_each)
    yield against_definition(OP, "paged-by-definition", _paged_by_definition)
    yield against_definition(OP, "slots-that-are-written", _written)
    ahead = partial(_ahead, poisoned=True), partial(_ahead, poisoned=False)
    yield Case(OP, "what-lies-ahead-is-not-read", *ahead, arithmetic="fma32")
    yield from _served()
    yield from _batches()
    for length, long in ((4096, False), (32_768, True)):
        shape = ((length,), 2, 1, 64)
        yield Case(
            OP,
            f"{_name(*shape)}-some-rows",
            partial(_rows_of_all, shape=shape),
            partial(_only_rows, shape=shape),
            by_definition=True,
            long=long,
        )
        serving = Serving(page=16, piece=1000)
        yield Case(
            OP,
            f"{_name(*shape)}-pages-of-16-pieces-of-1000",
            partial(_whole, shape=shape),
            partial(_from_pages, shape=shape, serving=serving),
            long=long,
        )
    yield from forced(OP, "lengths600", partial(_forward, shape=SHAPES[1]))
    yield from forced(OP, "lengths1+150+64+41-gradients", partial(_backward, shape=SHAPES[0]))


def _name(lengths: Sequence[int], heads: int, kv_heads: int, dim: int) -> str:
    return f"lengths{'+'.join(map(str, lengths))}-heads{heads}x{kv_heads}-dim{dim}"


def _attention(
    at: Subject,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    scale: float,
    positions: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    return attention(q, k, v, bounds, scale, positions, rows, **at.how)


def _attend(at: Subject, p: Packed) -> Tensor:
    return _attention(at, p.q, p.k, p.v, p.bounds, p.scale)


def _forward(at: Subject, shape: Shape) -> list[Tensor]:
    """The output, and the fp32 statistics that backward keeps: rounded outputs would hide most faults."""
    p = packed(at, *shape)
    module = implementation(OP, BACKENDS, at, p.q)
    _, m, lsum = module.forward(p.q, p.k, p.v, p.bounds, p.bounds, None, p.scale, True, at.arithmetic)
    return [_attend(at, p), m, lsum]


def _backward(at: Subject, shape: Shape) -> Sequence[Tensor]:
    p = packed(at, *shape)
    inputs = (t.cpu() for t in (p.q, p.k, p.v))
    return with_gradients(lambda q, k, v: _attention(at, q, k, v, p.bounds, p.scale), at, *inputs)


def _whole(at: Subject, shape: Shape) -> list[Tensor]:
    return [_attend(at, packed(at, *shape))]


def _from_pages(at: Subject, shape: Shape, serving: Serving) -> list[Tensor]:
    return [serve(at, packed(at, *shape), serving)]


def _served() -> Iterator[Case]:
    for shape in (SHAPES[0], SHAPES[1], SHAPES[2]):
        for page, piece in PAGES:
            name = f"{_name(*shape)}-pages-of-{page}-pieces-of-{piece}"
            right = partial(_from_pages, shape=shape, serving=Serving(page, piece))
            yield Case(OP, name, partial(_whole, shape=shape), right)
    decode: Shape = ((70, 30), 4, 2, 64)
    ways = {
        "one-token-at-a-time": Serving(page=16, piece=1),
        "prefill-and-decode-in-one-batch": Serving(page=16, piece=64, staggered=True),
        "reused-pages": Serving(page=16, piece=50, one_by_one=True),
        "preempted-and-resumed": Serving(page=16, piece=20, preempt_at=60),
        "pages-with-other-strides": Serving(page=16, piece=50, margin=3),
    }
    for name, serving in ways.items():
        which = decode if serving.piece == 1 else SHAPES[0]
        yield Case(OP, name, partial(_whole, shape=which), partial(_from_pages, shape=which, serving=serving))
    for page in (3, 16):
        name = f"many-requests-decode-over-chunks-pages-of-{page}"
        yield Case(OP, name, _last_of_many, partial(_decode_of_many, page=page))
    yield Case(OP, "reused-prefix", partial(_prefix, shared=False), partial(_prefix, shared=True))


def _prefix(at: Subject, shared: bool) -> list[Tensor]:
    """Two sequences with 96 equal tokens: the second takes the first one's pages instead of computing them."""
    p = packed(at, (200, 150), 4, 2, 64)
    for t in (p.q, p.k, p.v):
        t[200:296] = t[:96]
    return [serve(at, p, Serving(page=16, piece=70, shared_prefix=96)) if shared else _attend(at, p)]


def _batches() -> Iterator[Case]:
    together = partial(_apart, shape=SHAPES[2], reverse=False)
    yield Case(OP, "one-sequence-at-a-time", together, partial(_alone, shape=SHAPES[2]))
    yield Case(OP, "packing-order", together, partial(_apart, shape=SHAPES[2], reverse=True))
    yield Case(OP, "heads-cut-over-ranks", partial(_heads, ranks=1), partial(_heads, ranks=4))


def _apart(at: Subject, shape: Shape, reverse: bool) -> list[Tensor]:
    """Outputs and gradients per sequence, from a batch packed in either order (upstream gradients are ones)."""
    lengths = shape[0]
    p = packed(at, *shape)
    order = list(range(len(lengths)))[:: -1 if reverse else 1]
    rows = [torch.arange(p.starts[b], p.starts[b] + lengths[b]) for b in order]
    found = _backward_of_ones(at, p.take(torch.cat(rows), tuple(lengths[b] for b in order)))
    split = [t.split([lengths[b] for b in order]) for t in found]
    return [part[order.index(b)] for b in range(len(lengths)) for part in split]


def _alone(at: Subject, shape: Shape) -> list[Tensor]:
    lengths = shape[0]
    p = packed(at, *shape)
    out: list[Tensor] = []
    for start, length in zip(p.starts, lengths, strict=True):
        out += _backward_of_ones(at, p.take(torch.arange(start, start + length), (length,)))
    return out


def _backward_of_ones(at: Subject, p: Packed) -> list[Tensor]:
    q, k, v = (t.detach().requires_grad_() for t in (p.q, p.k, p.v))
    y = _attention(at, q, k, v, p.bounds, p.scale)
    y.backward(torch.ones_like(y))
    return [y.detach(), *(leaf.grad for leaf in (q, k, v) if leaf.grad is not None)]


def _heads(at: Subject, ranks: int) -> list[Tensor]:
    """Ranks of a tensor-parallel group hold neighbouring heads, as views of one tensor."""
    p = packed(at, (150, 106), 8, 4, 64)
    parts = zip(p.q.chunk(ranks, 1), p.k.chunk(ranks, 1), p.v.chunk(ranks, 1), strict=True)
    return [torch.cat([_attention(at, q, k, v, p.bounds, p.scale) for q, k, v in parts], dim=1)]


def _special(at: Subject) -> list[Tensor]:
    bounds = at.put(torch.tensor([0, 100, ROWS], dtype=torch.int32))
    q, k, v = (at.put(special(ROWS * n, 64, seed=n).view(ROWS, n, 64)) for n in (4, 2, 2))
    return [_attention(at, q, k, v, bounds, 0.125)]


def _views(at: Subject) -> list[Tensor]:
    """q, k and v cut out of one projection; rows outside every sequence are poison and give +0."""
    p = packed(DEFINITION, (100, 0, 156), 4, 2, 80)
    q, k, v = (at.put(inside(t, (0, 1, 8))) for t in (p.q, p.k, p.v))
    whole = _attention(at, q, k, v, at.put(inside(p.bounds)), p.scale)
    rows = at.put(inside(p.q, (0, 0, 0), before=0))
    padded = torch.cat([rows, torch.full((9, 4, 80), torch.nan, dtype=rows.dtype, device=rows.device)])
    return [whole, _attention(at, padded, k, v, at.put(p.bounds), p.scale)]


def _some_rows_of_each(at: Subject) -> list[Tensor]:
    """As a context-parallel rank computes: its own rows at any ascending positions over all keys."""
    p = packed(at, (300, 1, 200), 4, 2, 64)
    positions = [torch.cat([torch.arange(0, 75), torch.arange(225, 300)]), torch.arange(1), torch.arange(90, 200)]
    rows = torch.cat([own + start for own, start in zip(positions, p.starts, strict=True)])
    ends = torch.tensor([0, *torch.tensor([len(x) for x in positions]).cumsum(0).tolist()], dtype=torch.int32)
    where = at.put(torch.cat(positions).int())
    bounds, cut = p.bounds, at.put(ends)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attention(at, q, k, v, bounds, p.scale, where, cut)

    return list(with_gradients(function, at, p.q.cpu()[rows], p.k.cpu(), p.v.cpu()))


def _paged_by_definition(at: Subject) -> list[Tensor]:
    """Pages, tables and lengths inside poison; slots past a request's end hold poison too."""
    lengths, rows, page = (70, 1, 300, 16), (70, 1, 140, 5), 16
    p = packed(DEFINITION, lengths, 4, 2, 64)
    cache, tables = _in_pages(p, page)
    last = torch.cat([torch.arange(s + n - r, s + n) for s, n, r in zip(p.starts, lengths, rows, strict=True)])
    ends = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.cat([p.q[last], torch.full((3, 4, 64), torch.nan, dtype=torch.bfloat16)])
    table, seen = at.put(inside(tables, (0, 2))), at.put(inside(torch.tensor(lengths, dtype=torch.int32)))
    return [paged_attention(at.put(q), at.put(cache), table, seen, at.put(inside(ends)), p.scale, **at.how)]


def _in_pages(p: Packed, page: int) -> tuple[Tensor, Tensor]:
    """A cache whose pages hold the keys and values in some order, poison elsewhere, and the table of each sequence."""
    counts = [-(-length // page) for length in p.lengths]
    cache = torch.full((sum(counts) + 2, p.k.shape[1], page, 2 * p.k.shape[2]), torch.nan, dtype=torch.bfloat16)
    tables = torch.full((len(counts), max(counts) + 1), 10**6, dtype=torch.int32)
    for b, pages in enumerate((1 + torch.randperm(sum(counts), generator=generator(4))).split(counts)):
        tables[b, : counts[b]] = pages.int()
    sequence = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(p.lengths))
    at = torch.arange(len(p.k)) - torch.tensor(p.starts)[sequence]
    slots = tables[sequence, at // page].long() * page + at % page
    write_kv(p.k, p.v, cache, slots, backend="reference")
    return cache, tables


# So many requests that a program takes several of a request's chunks, whose ends it must tell apart.
MANY = (1100, 1025, 1300, *(1 + n % 40 for n in range(129)))


def _last_of_many(at: Subject) -> list[Tensor]:
    """The last token of each sequence, from packed keys."""
    p = packed(at, MANY, 16, 8, 64)
    last = at.put(torch.tensor(MANY).cumsum(0) - 1)
    positions, ends = at.put(torch.tensor(MANY, dtype=torch.int32) - 1), at.put(offsets((1,) * len(MANY)))
    return [_attention(at, p.q[last], p.k, p.v, p.bounds, p.scale, positions, ends)]


def _decode_of_many(at: Subject, page: int) -> list[Tensor]:
    """The same as one decode step over pages."""
    p = packed(DEFINITION, MANY, 16, 8, 64)
    cache, tables = _in_pages(p, page)
    q = p.q[torch.tensor(MANY).cumsum(0) - 1]
    seen, ends = torch.tensor(MANY, dtype=torch.int32), offsets((1,) * len(MANY))
    return [paged_attention(at.put(q), at.put(cache), at.put(tables), at.put(seen), at.put(ends), p.scale, **at.how)]


def _written(at: Subject) -> list[Tensor]:
    """write_kv touches the slots it was given and nothing else; slots below 0 are skipped."""
    p = packed(DEFINITION, (ROWS,), 4, 2, 64)
    block = torch.arange(40 * 2 * 20 * 128, dtype=torch.int16).view(torch.bfloat16).view(40, 2, 20, 128)
    slots = torch.randperm(40 * 16, generator=generator(4))[:ROWS]
    slots[::7] = -1
    whole = at.put(block)
    write_kv(at.put(inside(p.k, (0, 1, 4))), at.put(p.v), whole[:, :, 2:18], at.put(inside(slots)), backend=at.backend)
    return [whole]


def _ahead(at: Subject, poisoned: bool) -> list[Tensor]:
    p = packed(at, (300,), 4, 2, 64)
    if poisoned:
        for t in (p.q, p.k, p.v):
            t[270:] = torch.nan
    return [_attend(at, p)[:270]]


def _picked(length: int) -> Tensor:
    return torch.cat([torch.tensor([0, length - 1]), randint(0, length, ROWS - 2)]).sort().values


def _rows_of_all(at: Subject, shape: Shape) -> list[Tensor]:
    return [_attend(at, packed(at, *shape))[at.put(_picked(shape[0][0]))]]


def _only_rows(at: Subject, shape: Shape) -> list[Tensor]:
    p = packed(at, *shape)
    rows = at.put(_picked(shape[0][0]))
    ends = at.put(torch.tensor([0, ROWS], dtype=torch.int32))
    return [_attention(at, p.q[rows], p.k, p.v, p.bounds, p.scale, rows.int(), ends)]
