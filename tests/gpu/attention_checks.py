"""Batches, pages and comparisons for attention on a card; each function returns what must be equal by bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.ops.attention import reference
from samebits.ops.attention import triton as kernels


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


@dataclass(frozen=True)
class Batch:
    """Packed sequences on the card; `lengths` are those of the keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: list[int]
    scale: float

    @property
    def cu(self) -> Tensor:
        return offsets(self.lengths)

    def forward(self, how: object = None, arithmetic: str = "sm90", tail: int = 0) -> tuple[Tensor, ...]:
        """(out, m, l); `tail` rows of q lie outside every sequence."""
        q = torch.cat([self.q, self.q[:tail]])
        return kernels.forward(q, self.k, self.v, self.cu, self.cu, None, self.scale, True, arithmetic, how=how)

    def definition(self, arithmetic: str = "sm90") -> tuple[Tensor, ...]:
        return reference.forward(self.q, self.k, self.v, self.cu, self.cu, None, self.scale, True, arithmetic)


def batch(
    lengths: list[int], heads: tuple[int, int] = (4, 1), dim: int = 128, seed: int = 0, kind: str = "normal"
) -> Batch:
    """`kind`: normal; peaked (scores up to some hundreds); tiny (subnormal products); mixed (many exponents)."""
    g = torch.Generator("cuda").manual_seed(seed)
    tokens = sum(lengths)
    q, k, v = (torch.randn(tokens, h, dim, generator=g, device="cuda") for h in (heads[0], heads[1], heads[1]))
    if kind == "peaked":
        q, k = 6 * q, 6 * k
    elif kind == "tiny":
        q, v = q * 2.0**-70, v * 2.0**-110
    elif kind == "mixed":
        q, k, v = (
            x * torch.exp2(torch.randint(-12, 9, x.shape, generator=g, device="cuda").float()) for x in (q, k, v)
        )
    return Batch(q.bfloat16(), k.bfloat16(), v.bfloat16(), lengths, dim**-0.5)


@dataclass(frozen=True)
class Pages:
    """The keys and values of a batch in shuffled pages; whatever holds no token is NaN or an impossible page."""

    cache: Tensor
    table: Tensor
    source: Batch

    @staticmethod
    def of(source: Batch, size: int = 16, seed: int = 1) -> Pages:
        counts = [-(-n // size) for n in source.lengths]
        heads, dim = source.k.shape[1:]
        g = torch.Generator("cuda").manual_seed(seed)
        order = torch.randperm(sum(counts) + 3, generator=g, device="cuda").int()
        table = torch.full((len(counts), max(counts) + 2), -(2**31), dtype=torch.int32, device="cuda")
        for b, pages in enumerate(order[: sum(counts)].split(counts)):
            table[b, : counts[b]] = pages
        cache = torch.full((sum(counts) + 3, heads, size, 2 * dim), float("nan"), dtype=torch.bfloat16, device="cuda")
        pages = Pages(cache, table, source)
        slots = torch.cat([pages.slots(b, n) for b, n in enumerate(source.lengths)])
        kernels.write_kv(source.k, source.v, cache, slots)
        return pages

    def slots(self, b: int, length: int) -> Tensor:
        size, j = self.cache.shape[2], torch.arange(length, device="cuda")
        return self.table[b, j // size].long() * size + j % size

    def piece(
        self, rows: list[tuple[int, int]], how: object = None, arithmetic: str = "sm90", tail: int = 0,
        many: object = None,
    ) -> Tensor:  # fmt: skip
        """The outputs of query rows begin .. end of every sequence (none where begin = end), in one call.

        `how` is the launch for sequences of few rows, `many` that of the others.
        """
        cu = self.source.cu.tolist()
        at = torch.cat([torch.arange(cu[b] + x, cu[b] + y, device="cuda") for b, (x, y) in enumerate(rows)])
        q = torch.cat([self.source.q[at], self.source.q[:tail]])
        ends = torch.tensor([y for _, y in rows], device="cuda").int()
        starts = offsets([y - x for x, y in rows])
        out = kernels.paged(q, self.cache, self.table, ends, starts, self.source.scale, arithmetic, how=how, rows=many)
        assert not out[len(at) :].any()
        return out[: len(at)]

    def by_pieces(self, piece: int) -> Tensor:
        """Every sequence fed `piece` tokens at a time, all of them in one call per round."""
        lengths, out = self.source.lengths, torch.full_like(self.source.q, float("nan"))
        cu = self.source.cu.tolist()
        for begin in range(0, max(lengths), piece):
            rows = [(min(begin, n), min(begin + piece, n)) for n in lengths]
            at = torch.cat([torch.arange(cu[b] + x, cu[b] + y, device="cuda") for b, (x, y) in enumerate(rows)])
            out[at] = self.piece(rows)
        return out


def gradients(
    source: Batch, how: object = None, arithmetic: str = "sm90", positions: list[list[int]] | None = None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """((dq, dk, dv) of the kernels, of the definition) for all rows or for those at `positions`."""
    q, rows_of, at = source.q, source.cu, None
    g = torch.Generator("cuda").manual_seed(9)
    if positions is not None:
        at = torch.tensor([p for own in positions for p in own], device="cuda").int()
        rows_of = offsets([len(own) for own in positions])
        q = torch.randn(len(at), *q.shape[1:], generator=g, device="cuda").bfloat16()
    dout = torch.randn(q.shape, generator=g, device="cuda").bfloat16()
    call = (rows_of, source.cu, at, source.scale)
    out, m, lsum = kernels.forward(q, source.k, source.v, *call, True, arithmetic)
    inputs = (dout, q, source.k, source.v, out, m, lsum, *call, arithmetic)
    return kernels.backward(*inputs, how), reference.backward(*inputs)
