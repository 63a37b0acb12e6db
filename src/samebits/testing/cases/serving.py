"""Packed sequences, and a small paged cache that serves them as an engine would: in pieces, mixed, preempted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.ops.attention import paged_attention, write_kv
from samebits.testing.cases.case import Subject
from samebits.testing.cases.inputs import generator, randn

FAR = 10**6  # a page number that nobody may follow


@dataclass(frozen=True)
class Packed:
    """q [T, Hq, D], k and v [T, Hkv, D] bf16 of sequences laid one after another."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: tuple[int, ...]
    bounds: Tensor  # int32 [B + 1]

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    @property
    def starts(self) -> list[int]:
        """The first row of each sequence."""
        return [sum(self.lengths[:b]) for b in range(len(self.lengths))]

    def take(self, rows: Tensor, lengths: tuple[int, ...]) -> Packed:
        """Other sequences, made of these rows."""
        where = rows.to(self.q.device)
        return Packed(self.q[where], self.k[where], self.v[where], lengths, offsets(lengths).to(self.q.device))


@dataclass(frozen=True)
class Serving:
    """How sequences are fed to the paged kernel: `piece` tokens of each live sequence per call.

    `staggered`: sequence b starts b calls late and decodes token by token after its first piece. `one_by_one`: each
    sequence is served alone, in the pages that the one before it left behind. `preempt_at`: once a sequence has this
    many tokens it loses its pages, which are filled with NaN, and is computed again in others. `shared_prefix`: all
    sequences but the first take the pages of the first one's first tokens. `margin`: slots of poison in each page.
    """

    page: int
    piece: int
    staggered: bool = False
    one_by_one: bool = False
    preempt_at: int = 0
    shared_prefix: int = 0
    margin: int = 0


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([sum(lengths[:b]) for b in range(len(lengths) + 1)], dtype=torch.int32)


def packed(at: Subject, lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int) -> Packed:
    total = sum(lengths)
    q, k, v = randn(total, heads, dim), randn(total, kv_heads, dim, seed=1), randn(total, kv_heads, dim, seed=2)
    return Packed(at.put(q), at.put(k), at.put(v), lengths, at.put(offsets(lengths)))


def serve(at: Subject, p: Packed, how: Serving) -> Tensor:
    """The attention of all rows [T, Hq, D], computed call by call from pages."""
    server = _Server(at, p, how)
    if how.one_by_one:
        for b in range(len(p.lengths)):
            while server.done[b] < p.lengths[b]:
                server.call({b: how.piece})
            server.release(b)
    else:
        if how.shared_prefix:
            server.share(how.shared_prefix)
        calls = 0
        while any(done < length for done, length in zip(server.done, p.lengths, strict=True)):
            server.call(server.due(calls))
            calls += 1
    return server.out


class _Server:
    """A cache of pages in shuffled order and what each sequence has computed so far."""

    def __init__(self, at: Subject, p: Packed, how: Serving) -> None:
        self.at, self.p, self.how = at, p, how
        lengths = [max(p.lengths)] if how.one_by_one else p.lengths
        count = 1 + sum(-(-length // how.page) for length in lengths) * (2 if how.preempt_at else 1)
        kv_heads, dim = p.k.shape[1:]
        slots = how.page + 2 * how.margin
        whole = torch.full((count, kv_heads, slots, 2 * dim), torch.nan, dtype=torch.bfloat16, device=p.q.device)
        self.cache = whole[:, :, how.margin : how.margin + how.page]
        self.free: list[int] = torch.randperm(count, generator=generator(4)).tolist()
        self.pages: list[list[int]] = [[] for _ in p.lengths]
        self.done = [0] * len(p.lengths)
        self.preempted = [False] * len(p.lengths)
        self.out = torch.empty_like(p.q)

    def due(self, calls: int) -> dict[int, int]:
        """How many tokens each live sequence gets in this call."""
        tokens = {}
        for b, done in enumerate(self.done):
            if done < self.p.lengths[b] and (calls >= b or not self.how.staggered):
                tokens[b] = 1 if self.how.staggered and done else self.how.piece
        return tokens

    def share(self, tokens: int) -> None:
        """Serve the first sequence's prefix, and give its pages to all others."""
        self.call({0: tokens})
        for b in range(1, len(self.done)):
            self.pages[b], self.done[b] = list(self.pages[0]), tokens
            self.out[self.p.starts[b] : self.p.starts[b] + tokens] = self.out[:tokens]

    def release(self, b: int, fill: float | None = None) -> None:
        for page in self.pages[b]:
            if fill is not None:
                self.cache[page] = fill
            self.free.insert(0, page)
        self.pages[b], self.done[b] = [], 0 if fill is not None else self.done[b]

    def call(self, tokens: dict[int, int]) -> None:
        """One call of the kernel: write the new keys and values, then attend."""
        spans = {}
        for b, count in tokens.items():
            if self.how.preempt_at and self.done[b] >= self.how.preempt_at and not self.preempted[b]:
                count, self.preempted[b] = self.done[b] + count, True
                taken = self.free.pop()
                self.release(b, fill=torch.nan)
                self.free.insert(0, taken)
            begin = self.done[b]
            end = min(begin + count, self.p.lengths[b])
            while len(self.pages[b]) * self.how.page < end:
                self.pages[b].append(self.free.pop())
            spans[b], self.done[b] = (begin, end), end
        self._compute(spans)

    def _compute(self, spans: dict[int, tuple[int, int]]) -> None:
        size, starts, put = self.how.page, self.p.starts, self.at.put
        flat = torch.cat([torch.arange(starts[b] + begin, starts[b] + end) for b, (begin, end) in spans.items()])
        slots = [self.pages[b][j // size] * size + j % size for b, span in spans.items() for j in range(*span)]
        tables = torch.full((len(spans), max(len(self.pages[b]) for b in spans) + 1), FAR, dtype=torch.int32)
        for row, b in enumerate(spans):
            tables[row, : len(self.pages[b])] = torch.tensor(self.pages[b], dtype=torch.int32)
        rows = put(flat)
        key, value = self.p.k[rows], self.p.v[rows]
        write_kv(key, value, self.cache, put(torch.tensor(slots)), backend=self.at.backend)
        seen = torch.tensor([end for _, end in spans.values()], dtype=torch.int32)
        bounds = offsets(tuple(end - begin for begin, end in spans.values()))
        arguments = (self.p.q[rows], self.cache, put(tables), put(seen), put(bounds), self.p.scale)
        self.out[rows] = paged_attention(*arguments, **self.at.how)
