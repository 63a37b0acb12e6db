"""Attention: every form and schedule against the definition, by bits."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from samebits import _cpu
from samebits.bits import assert_same, first_difference
from samebits.ops.attention import attention, paged_attention, reference, write_kv
from samebits.ops.attention.scale import exponent_scale

LENGTHS = (1, 63, 64, 65, 0, 511, 512, 513, 1100)
HEADS = [(1, 1), (4, 2), (8, 2), (8, 1), (16, 1), (3, 3)]
POISON = float("nan")
NAMES = ("out", "dq", "dk", "dv")


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """The reference is many small torch operations; threads only slow them down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def offsets(lengths: tuple[int, ...] | list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@dataclass(frozen=True)
class Batch:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu: torch.Tensor
    scale: float

    def run(self, backend: str = "cpu") -> torch.Tensor:
        return attention(self.q, self.k, self.v, self.cu, self.scale, backend=backend)


def batch_of(lengths: tuple[int, ...], heads: tuple[int, int] = (4, 2), dim: int = 32, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    q, k, v = (2 * torch.randn(tokens, h, dim, generator=g) for h in (heads[0], heads[1], heads[1]))
    return Batch(q.bfloat16(), k.bfloat16(), v.bfloat16(), offsets(lengths), dim**-0.5)


@dataclass(frozen=True)
class Pages:
    """The keys and values of a batch in shuffled pages; whatever holds no token is NaN or an impossible page."""

    cache: torch.Tensor
    table: torch.Tensor

    @staticmethod
    def of(batch: Batch, size: int, seed: int = 1) -> "Pages":
        lengths = batch.cu.diff().tolist()
        counts = [-(-n // size) for n in lengths]
        heads, dim = batch.k.shape[1:]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).int()
        table = torch.full((len(lengths), max(counts) + 2), -(2**31), dtype=torch.int32)
        for b, pages in enumerate(order[: sum(counts)].split(counts)):
            table[b, : counts[b]] = pages
        cache = torch.full((sum(counts) + 3, heads, size, 2 * dim), POISON, dtype=torch.bfloat16)
        pages = Pages(cache, table)
        for b, n in enumerate(lengths):
            rows = slice(int(batch.cu[b]), int(batch.cu[b + 1]))
            write_kv(batch.k[rows], batch.v[rows], cache, pages.slots(b, 0, n))
        return pages

    def slots(self, b: int, begin: int, end: int) -> torch.Tensor:
        size, j = self.cache.shape[2], torch.arange(begin, end)
        return self.table[b, j // size].long() * size + j % size


def by_pieces(batch: Batch, pages: Pages, piece: int) -> torch.Tensor:
    """Every sequence fed `piece` tokens at a time, all of them in one call per round."""
    lengths, out = batch.cu.diff(), torch.full_like(batch.q, POISON)
    for begin in range(0, int(lengths.max()), piece):
        live = [b for b, n in enumerate(lengths.tolist()) if n > begin]
        ends = lengths[live].clamp(max=begin + piece)
        rows = torch.cat([int(batch.cu[b]) + torch.arange(begin, int(e)) for b, e in zip(live, ends, strict=True)])
        starts = offsets((ends - begin).tolist())
        out[rows] = paged_attention(batch.q[rows], pages.cache, pages.table[live], ends.int(), starts, batch.scale)
    return out


def upstream(shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).bfloat16()


def gradients(
    batch: Batch, backend: str = "cpu", dout: torch.Tensor | None = None, **rows: torch.Tensor
) -> list[torch.Tensor]:
    """[out, dq, dk, dv]."""
    q, k, v = (x.clone().requires_grad_() for x in (batch.q, batch.k, batch.v))
    out = attention(q, k, v, batch.cu, batch.scale, backend=backend, **rows)
    out.backward(upstream(out.shape) if dout is None else dout)
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("isa", ["scalar", "avx2", "best"])
def test_kernel_gives_the_reference_bits_at_every_length(isa: str, instruction_set) -> None:
    batch = batch_of(LENGTHS, (2, 1), 32)
    instruction_set(isa)
    assert_same(batch.run(), batch.run("reference"))


@pytest.mark.parametrize("dim", [5, 32, 64, 80, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_kernel_gives_the_reference_bits_for_every_shape(heads: tuple[int, int], dim: int, instruction_set) -> None:
    batch = batch_of((70, 190), heads, dim)
    want = batch.run("reference")
    assert_same(batch.run(), want)
    instruction_set("avx2")
    assert_same(batch.run(), want, "avx2")


@pytest.mark.parametrize("size", [1, 3, 16, 128, 600])
def test_pages_give_the_packed_bits(size: int) -> None:
    batch = batch_of(LENGTHS)
    pages = Pages.of(batch, size)
    got = paged_attention(batch.q, pages.cache, pages.table, batch.cu.diff(), batch.cu, batch.scale)
    assert_same(got, batch.run())


def test_paged_reference_is_the_packed_reference() -> None:
    batch = batch_of((1, 65, 200))
    pages = Pages.of(batch, 16)
    lengths = batch.cu.diff()
    got = paged_attention(batch.q, pages.cache, pages.table, lengths, batch.cu, batch.scale, backend="reference")
    assert_same(got, batch.run("reference"))
    again = torch.full_like(pages.cache, POISON)
    slots = torch.cat([pages.slots(b, 0, n) for b, n in enumerate(lengths.tolist())])
    write_kv(batch.k, batch.v, again, slots, backend="reference")
    assert_same(again, pages.cache)


@pytest.mark.parametrize("piece", [1, 7, 64, 100, 513])
def test_pieces_and_decode_give_the_whole_prefill(piece: int) -> None:
    batch = batch_of((1, 65, 130, 600), (4, 1))
    assert_same(by_pieces(batch, Pages.of(batch, 16), piece), batch.run())


def test_prefill_extension_and_decode_share_a_call() -> None:
    batch = batch_of((300, 600, 64, 5))
    pages = Pages.of(batch, 16)
    rows = torch.cat([torch.arange(300), 300 + torch.arange(599, 600), 900 + torch.arange(40, 64)])
    rows = torch.cat([rows, 964 + torch.arange(5)])
    starts = offsets([300, 1, 24, 5])
    got = paged_attention(batch.q[rows], pages.cache, pages.table, batch.cu.diff(), starts, batch.scale)
    assert_same(got, batch.run()[rows])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_subset_of_rows_gives_the_whole_rows(backend: str) -> None:
    """As under context parallelism: two pieces of each sequence, keys whole."""
    batch = batch_of((600, 80, 0, 9))
    positions = [torch.cat([torch.arange(n // 8), torch.arange(n - n // 3, n)]) for n in batch.cu.diff().tolist()]
    rows = torch.cat([int(begin) + p for begin, p in zip(batch.cu[:-1], positions, strict=True)])
    counts = offsets([len(p) for p in positions])
    got = attention(
        batch.q[rows], batch.k, batch.v, batch.cu, batch.scale, torch.cat(positions).int(), counts, backend=backend
    )
    assert_same(got, batch.run()[rows])


def test_batch_and_threads_move_no_bit() -> None:
    batch = batch_of(LENGTHS)
    grads, dout = gradients(batch), upstream(batch.q.shape)
    alone = [
        gradients(Batch(*(x[a:b] for x in (batch.q, batch.k, batch.v)), offsets([b - a]), batch.scale), dout=dout[a:b])
        for a, b in zip(batch.cu[:-1].tolist(), batch.cu[1:].tolist(), strict=True)
    ]
    for name, got, want in zip(NAMES, zip(*alone, strict=True), grads, strict=True):
        assert_same(torch.cat(got), want, f"{name} of sequences alone")
    for threads in (1, 5):
        _cpu.set_threads(threads)
        try:
            again = gradients(batch)
        finally:
            _cpu.set_threads(0)
        for name, got, want in zip(NAMES, again, grads, strict=True):
            assert_same(got, want, f"{name} with {threads} threads")


def test_views_are_read_in_place() -> None:
    batch = batch_of((300,), (4, 2), 32)
    fused = torch.full((300, 8 * 32 + 10), POISON, dtype=torch.bfloat16)
    views = [fused[:, a * 32 : b * 32].view(300, b - a, 32) for a, b in ((0, 4), (4, 6), (6, 8))]
    for view, x in zip(views, (batch.q, batch.k, batch.v), strict=True):
        view.copy_(x)
    assert_same(attention(*views, batch.cu, batch.scale), batch.run())
    pages = Pages.of(batch, 16)
    other_order = pages.cache.transpose(1, 2).contiguous().transpose(1, 2)
    got = paged_attention(batch.q, other_order, pages.table, batch.cu.diff(), batch.cu, batch.scale)
    assert_same(got, batch.run())
    again = torch.full_like(other_order, POISON)
    write_kv(batch.k, batch.v, again, pages.slots(0, 0, 300))
    assert_same(again, pages.cache)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_rows_outside_every_sequence_are_zero(backend: str) -> None:
    batch = batch_of((3, 20, 5))
    shorter = Batch(batch.q, batch.k, batch.v, offsets([3, 20]), batch.scale)
    out, dq, dk, dv = gradients(shorter, backend)
    for x in (out, dq, dk, dv):
        assert_same(x[23:], torch.zeros_like(x[23:]))
    assert_same(out[:23], batch.run(backend)[:23])


def test_padding_of_a_cache_write_is_skipped() -> None:
    batch = batch_of((4,))
    cache = torch.zeros(2, 2, 3, 64, dtype=torch.bfloat16)
    write_kv(batch.k, batch.v, cache, torch.tensor([5, -1, 0]))
    assert_same(cache[1, :, 2], torch.cat([batch.k[0], batch.v[0]], -1))
    assert_same(cache[0, :, 0], torch.cat([batch.k[2], batch.v[2]], -1))
    assert int(cache.count_nonzero()) == 2 * 2 * 64


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_nan_reaches_its_rows_and_no_other(backend: str) -> None:
    batch = batch_of((100,), (2, 1), 16)
    clean = batch.run(backend)
    for broken in (POISON, float("inf")):
        k, v = batch.k.clone(), batch.v.clone()
        k[40, 0, 3], v[70, 0, 1] = POISON, broken
        out = attention(batch.q, k, v, batch.cu, batch.scale, backend=backend)
        assert_same(out[:40], clean[:40])
        assert_same(out[40:], torch.full_like(out[40:], POISON))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_masked_keys_only_turn_minus_zero_into_plus_zero(backend: str) -> None:
    """All weight on a value of +0, the rest on values so small that p * v rounds to -0."""
    k = torch.zeros(64, 1, 16, dtype=torch.bfloat16)
    k[0], v = 1.0, torch.full((64, 1, 16), -(2.0**-133), dtype=torch.bfloat16)
    v[0] = 0.0
    q = torch.full((64, 1, 16), 2.0, dtype=torch.bfloat16)
    out = attention(q, k, v, offsets([64]), 1.0, backend=backend)
    assert torch.equal(out, torch.zeros_like(out))
    assert not out[:63].signbit().any()
    assert out[63].signbit().all()


@pytest.mark.parametrize("isa", ["scalar", "avx2", "best"])
def test_backward_gives_the_reference_bits(isa: str, instruction_set) -> None:
    batch = batch_of((1, 63, 64, 65, 0, 130, 17), (4, 2), 32)
    want = gradients(batch, "reference")
    instruction_set(isa)
    for name, a, b in zip(NAMES, gradients(batch), want, strict=True):
        assert_same(a, b, name)


@pytest.mark.parametrize(("heads", "dim"), [((1, 1), 64), ((8, 1), 80), ((16, 1), 5), ((3, 3), 128)])
def test_backward_gives_the_reference_bits_for_every_shape(heads: tuple[int, int], dim: int) -> None:
    batch = batch_of((70, 190), heads, dim)
    for name, a, b in zip(NAMES, gradients(batch), gradients(batch, "reference"), strict=True):
        assert_same(a, b, name)


def test_backward_of_a_subset() -> None:
    batch = batch_of((150, 600))
    positions = torch.cat([torch.arange(10, 40), torch.arange(120, 150), torch.arange(590, 600)]).int()
    rows = torch.cat([positions[:60], 150 + positions[60:]]).long()
    part = Batch(batch.q[rows], batch.k, batch.v, batch.cu, batch.scale)
    keep = {"q_positions": positions, "cu_seqlens_q": offsets([60, 10])}
    for name, a, b in zip(NAMES, gradients(part, **keep), gradients(part, "reference", **keep), strict=True):
        assert_same(a, b, name)


def test_close_to_float64() -> None:
    batch = batch_of((65, 700), (4, 2), 64)
    q, k, v = (x.double().requires_grad_() for x in (batch.q, batch.k, batch.v))
    exact = []
    for a, b in zip(batch.cu[:-1].tolist(), batch.cu[1:].tolist(), strict=True):
        keys, values = (x[a:b].repeat_interleave(2, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[a:b], keys) * batch.scale
        future = torch.ones(b - a, b - a, dtype=torch.bool).triu(1)
        exact.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(future, -torch.inf).softmax(-1), values))
    want = torch.cat(exact)
    out, *grads = gradients(batch)
    want.backward(upstream(want.shape).double())
    assert (out.double() - want).abs().max() <= 2**-7 * want.abs().max()
    for name, got, leaf in zip(("dq", "dk", "dv"), grads, (q, k, v), strict=True):
        assert (got.double() - leaf.grad).abs().max() <= 0.01 * leaf.grad.abs().max(), name


FAULTS = {
    "chunks of 1024": ("CHUNK", 1024),
    "tiles of 32": ("TILE", 32),
    "row sum in another order": ("fold_halves", lambda p: p.cumsum(-1)[..., -1]),
    "weights not rounded": ("to_bf16", lambda x: x),
    "c one unit off": ("exponent_scale", lambda s: torch.tensor(exponent_scale(s)).nextafter(torch.tensor(9.0)).item()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_definition_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of((700,), (2, 1), 32)
    name, wrong = FAULTS[fault]
    monkeypatch.setattr(reference, name, wrong)
    assert first_difference(batch.run(), batch.run("reference")) is not None


def test_a_wrong_mask_and_a_stale_page_are_noticed() -> None:
    batch = batch_of((300,))
    want = batch.run()
    shifted = (torch.arange(300) - 1).clamp(min=0).int()
    early = attention(batch.q, batch.k, batch.v, batch.cu, batch.scale, shifted, batch.cu)
    assert (early != want).flatten(1).any(1).sum() >= 256
    pages = Pages.of(batch, 16)
    pages.cache[pages.table[0, 3]] = pages.cache[pages.table[0, 4]]
    stale = paged_attention(batch.q, pages.cache, pages.table, batch.cu.diff(), batch.cu, batch.scale)
    assert_same(stale[:48], want[:48])
    assert (stale[48:] != want[48:]).flatten(1).any(1).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_wrong_calls_are_named(backend: str) -> None:
    b = batch_of((10, 6))
    pages = Pages.of(b, 4)

    def packed(cu: list[int], *rows: torch.Tensor) -> torch.Tensor:
        return attention(b.q, b.k, b.v, torch.tensor(cu).int(), 1.0, *rows, backend=backend)

    def paged(table: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return paged_attention(b.q, pages.cache, table, torch.tensor(lengths).int(), b.cu, 1.0, backend=backend)

    for cu in ([0, 10, 17], [1, 10, 16], [0, 12, 10]):
        with pytest.raises(ValueError, match="must start at 0, ascend and end by 16"):
            packed(cu)
    for positions in (torch.arange(16), torch.arange(16).flip(0), torch.full((16,), -1)):
        with pytest.raises(ValueError, match="q_positions of sequence 0 must be non-descending and in"):
            packed([0, 10, 16], positions.int(), torch.tensor([0, 16, 16]).int())
    with pytest.raises(ValueError, match="together, or neither"):
        packed([0, 10, 16], torch.arange(16).int())
    with pytest.raises(ValueError, match="cu_seqlens must start with a 0"):
        packed([])
    with pytest.raises(ValueError, match="the pages of a request must be adjacent"):
        paged(pages.table.repeat_interleave(2, 1)[:, ::2], [10, 6])
    for out in (torch.zeros(b.q.shape), b.q.transpose(0, 1).contiguous().transpose(0, 1), b.q[1:]):
        with pytest.raises(ValueError, match=r"out must be contiguous bfloat16 \[16, 4, "):
            paged_attention(b.q, pages.cache, pages.table, b.cu.diff(), b.cu, 1.0, backend=backend, out=out)
    with pytest.raises(ValueError, match="contiguous int32"):
        attention(b.q, b.k, b.v, b.cu.long(), 1.0, backend=backend)
    with pytest.raises(ValueError, match="4 query heads are not a multiple of 3"):
        attention(b.q, b.k.repeat(1, 2, 1)[:, :3], b.v.repeat(1, 2, 1)[:, :3], b.cu, 1.0, backend=backend)
    with pytest.raises(ValueError, match=r"bfloat16 with 3 axes, got torch\.float32"):
        attention(b.q.float(), b.k, b.v, b.cu, 1.0, backend=backend)
    with pytest.raises(ValueError, match="request 0 has 9 tokens, 10 query rows"):
        paged(pages.table, [9, 6])
    with pytest.raises(ValueError, match="request 1 uses a page outside"):
        paged(pages.table, [10, 12])
    with pytest.raises(ValueError, match="slot 99 is outside a cache"):
        write_kv(b.k, b.v, pages.cache, torch.tensor([99]), backend=backend)


def test_counters_advance() -> None:
    names = ("attention", "attention_backward", "paged_attention", "write_kv")
    before = _cpu.counters()
    batch = batch_of((5,))
    gradients(batch)
    by_pieces(batch, Pages.of(batch, 16), 5)
    assert [_cpu.counters()[n] - before[n] for n in names] == [1, 1, 1, 1]
