"""Attention on a card against the definition under its own arithmetic, for every launch and every form."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from samebits.backends import device_arithmetic
from samebits.backends.device_counters import counters
from samebits.bits import assert_same, first_difference
from samebits.ops.attention import BACKENDS, HeadConstants, attention, launch, paged_attention, prepare_heads
from samebits.ops.attention import heads as heads_module
from samebits.ops.rotary import rotary_table

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: run `python -m pytest tests/gpu` on a machine with one"
)


def _checks():
    """The helper module beside this file (the kernels it needs exist only where Triton does)."""
    name = "attention_checks"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


ROWS = [
    launch.Rows(128, 4, 3, copies=True),
    launch.Rows(128, 4, 2, copies=True),
    launch.Rows(128, 4, 4, copies=True),
    launch.Rows(128, 8, 2),
    launch.Rows(128, 8, 3),
    launch.Rows(64, 4, 3),
    launch.Rows(16, 4, 1),
]
SPLITS = [
    launch.Split(16, 1, False, 1, 2, 4, 8, copies=True),
    launch.Split(16, 3, False, 1, 3, 1, 8, copies=True),
    launch.Split(16, 64, False, 1, 2, 1, 4, copies=True),
    launch.Split(16, 1, False, 4, 3, 4, 8),
    launch.Split(16, 2, False, 2, 4, 16, 2),
]
BACKWARDS = [
    (launch.Rows(128, 8, 2), launch.Keys(128, 64, 8, 2)),
    (launch.Rows(64, 4, 2), launch.Keys(64, 64, 4, 2)),
    (launch.Rows(128, 8, 1), launch.Keys(64, 32, 4, 1)),
]
LENGTHS = [1, 63, 64, 65, 0, 511, 512, 513, 1100]


def arithmetic() -> str:
    return device_arithmetic(torch.device("cuda", 0))


def same(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("how", ROWS, ids=str)
def test_every_launch_gives_the_bits_of_the_definition_at_every_length(how: launch.Rows) -> None:
    source = _checks().batch(LENGTHS)
    got = source.forward(how, arithmetic(), tail=3)
    same([x[:-3] for x in got], source.definition(arithmetic()))
    assert not any(x[-3:].any() for x in got)


@pytest.mark.parametrize("kind", ["peaked", "tiny", "mixed"])
def test_extreme_values(kind: str) -> None:
    source = _checks().batch([300, 700], kind=kind)
    want = source.definition(arithmetic())
    same(source.forward(None, arithmetic()), want)
    pages = _checks().Pages.of(source)
    last = [(n - 1, n) for n in source.lengths]
    assert_same(pages.piece(last, None, arithmetic()), want[0][[299, 999]])


@pytest.mark.parametrize(("heads", "dim"), [((1, 1), 64), ((8, 1), 128), ((6, 2), 80), ((3, 3), 40), ((16, 1), 256)])
def test_other_shapes(heads: tuple[int, int], dim: int) -> None:
    source = _checks().batch([70, 600], heads, dim)
    want = source.definition(arithmetic())
    same(source.forward(None, arithmetic()), want)
    assert_same(
        _checks().Pages.of(source, 3).piece([(66, 70), (599, 600)], None, arithmetic()), want[0][[66, 67, 68, 69, 669]]
    )
    same(*_checks().gradients(source, None, arithmetic()))


def test_nan_and_infinite_scores_make_their_rows_nan_and_no_others() -> None:
    source = _checks().batch([200])
    source.q[20] = float("nan")
    source.q[30] = 3e38
    got, want = source.forward(None, arithmetic()), source.definition(arithmetic())
    assert_same(got[0], want[0])
    assert got[0][20].isnan().all()
    assert got[0].isnan().any(-1).any(-1).sum() == 2


@pytest.mark.parametrize("how", SPLITS, ids=str)
@pytest.mark.parametrize("size", [16, 48])
def test_one_token_decode_gives_the_prefill_bits_for_every_launch(how: launch.Split, size: int) -> None:
    source = _checks().batch([n for n in LENGTHS if n] * 8, seed=5)
    want = source.forward(None, arithmetic())[0]
    last = [(n - 1, n) for n in source.lengths]
    got = _checks().Pages.of(source, size).piece(last, how, arithmetic(), tail=2)
    assert_same(got, want[source.cu[1:].long() - 1])


@pytest.mark.parametrize("piece", [1, 4, 100, 513])
def test_pieces_give_the_whole_prefill(piece: int) -> None:
    lengths = [1, 65, 130] if piece == 1 else [1, 65, 130, 600]
    source = _checks().batch(lengths)
    assert_same(_checks().Pages.of(source).by_pieces(piece), source.forward(None, arithmetic())[0])


def test_prefill_extension_and_decode_share_a_call() -> None:
    source = _checks().batch([300, 600, 64, 5])
    rows = [(0, 300), (510, 600), (63, 64), (2, 5)]
    got = _checks().Pages.of(source).piece(rows, None, arithmetic(), tail=2)
    cu = source.cu.tolist()
    at = torch.cat([torch.arange(cu[b] + x, cu[b] + y) for b, (x, y) in enumerate(rows)])
    assert_same(got, source.definition(arithmetic())[0][at.cuda()])


@pytest.mark.parametrize("many", [how for how in ROWS if how.copies] + [launch.Rows(128, 8, 2)], ids=str)
@pytest.mark.parametrize("size", [16, 48, 64])
@pytest.mark.parametrize("dim", [64, 128])
def test_pages_give_the_bits_of_the_definition(many: launch.Rows, size: int, dim: int) -> None:
    lengths = [300, 600, 64, 1, 1100, 128, 5]
    source = _checks().batch(lengths, dim=dim)
    rows = [(0, 300), (37, 600), (63, 64), (0, 1), (500, 1100), (100, 128), (2, 5)]
    got = _checks().Pages.of(source, size).piece(rows, None, arithmetic(), tail=2, many=many)
    cu = source.cu.tolist()
    at = torch.cat([torch.arange(cu[b] + x, cu[b] + y) for b, (x, y) in enumerate(rows)])
    assert_same(got, source.definition(arithmetic())[0][at.cuda()])


@pytest.mark.parametrize("how", BACKWARDS, ids=str)
def test_gradients_give_the_bits_of_the_definition(how) -> None:
    same(*_checks().gradients(_checks().batch([1, 65, 0, 300], (4, 1)), how, arithmetic()))
    same(*_checks().gradients(_checks().batch([200, 130], (4, 2), 64), how, arithmetic()))


def test_gradients_for_some_rows() -> None:
    positions = [[3, 4, 60, 61, 69], list(range(40, 266)), []]
    same(*_checks().gradients(_checks().batch([70, 266, 30], (4, 2)), None, arithmetic(), positions))


def test_the_same_run_twice_gives_the_same_gradients() -> None:
    source = _checks().batch([2000, 1500], (8, 2))
    g = torch.randn(source.q.shape, generator=torch.Generator("cuda").manual_seed(2), device="cuda").bfloat16()

    def run() -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (source.q, source.k, source.v)]
        attention(*leaves, source.cu, source.scale).backward(g)
        return [x.grad for x in leaves if x.grad is not None]

    first = run()
    for _ in range(5):
        same(run(), first)


def test_the_slow_form_gives_the_bits_of_a_cpu() -> None:
    source = _checks().batch([1, 70, 600], (4, 2), 32)
    want = source.definition("fma32")
    same(source.forward(None, "fma32"), want)
    pages = _checks().Pages.of(source)
    rows = [(0, 1), (69, 70), (590, 600)]
    got = paged_attention(
        torch.cat([source.q[0:1], source.q[70:71], source.q[661:]]), pages.cache, pages.table,
        torch.tensor([1, 70, 600], device="cuda").int(), _checks().offsets([y - x for x, y in rows]), source.scale,
        arithmetic="fma32",
    )  # fmt: skip
    assert_same(got, torch.cat([want[0][0:1], want[0][70:71], want[0][661:]]))
    same(*_checks().gradients(_checks().batch([70, 20], (4, 2), 32), None, "fma32"))


@pytest.mark.skipif(
    importlib.util.find_spec("samebits._cpu") is None, reason="the compiled CPU kernels are missing here"
)
def test_the_slow_form_gives_the_bits_of_the_compiled_cpu_kernels() -> None:
    source = _checks().batch([1, 70, 600], (4, 2), 32)
    q, k, v, cu = (x.cpu() for x in (source.q, source.k, source.v, source.cu))
    want = BACKENDS["cpu"].forward(q, k, v, cu, cu, None, source.scale, True, "fma32")
    same([x.cpu() for x in source.forward(None, "fma32")], want)


@pytest.mark.parametrize("fault", ["one key", "one value", "order of chunks"])
def test_a_seeded_fault_is_seen(fault: str) -> None:
    source = _checks().batch([1100])
    want = source.definition(arithmetic())
    if fault == "one key":
        source.k[700, 0, 5] += 2.0**-5
    elif fault == "one value":
        source.v[700, 0, 5] += 2.0**-5
    else:  # the same keys, other chunks
        order = torch.cat([torch.arange(512, 1024), torch.arange(0, 512), torch.arange(1024, 1100)]).cuda()
        source.k[:], source.v[:] = source.k[order], source.v[order]
    got = source.forward(None, arithmetic())
    assert first_difference(got[2][1099:], want[2][1099:]) is not None or fault == "one value"
    assert first_difference(got[0][1050:], want[0][1050:]) is not None


def test_replayed_graphs_give_the_same_bits_and_advance_the_counter() -> None:
    source = _checks().batch([700, 30, 1100])
    pages = _checks().Pages.of(source)
    cu = source.cu.long()
    q = source.q[cu[1:] - 1].contiguous()
    index = (pages.table, torch.tensor(source.lengths, device="cuda").int(), _checks().offsets([1, 1, 1]))
    want = paged_attention(q, pages.cache, *index, source.scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(q, pages.cache, *index, source.scale)
    before = counters()["attention.chunk_states"]
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert_same(out, want)
    assert counters()["attention.chunk_states"] == before + 3


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "norms"), [(8, 2, 128, True), (4, 4, 64, True), (6, 2, 32, False)]
)
def test_one_launch_prepares_heads_as_norm_rotation_and_copy_do(
    heads: int, kv_heads: int, dim: int, norms: bool
) -> None:
    g = torch.Generator("cuda").manual_seed(dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device="cuda").bfloat16()

    qkv = normal(300, (heads + 2 * kv_heads) * dim)
    qkv[3], qkv[4] = float("nan"), qkv[4] * 1e30
    positions = torch.randint(0, 90, (300,), generator=g, device="cuda")
    cos, sin = (part.cuda() for part in rotary_table(dim, 1e4, 100))
    constants = HeadConstants((cos, sin), (normal(dim), normal(dim), 1e-6) if norms else None)
    slots = torch.randperm(20 * 16, generator=g, device="cuda")[:290]  # the last rows are padding
    slots[7] = -1
    one, other = (torch.zeros(20, kv_heads, 16, 2 * dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    want = heads_module._one_by_one(qkv, positions, constants, one, slots)
    assert_same(prepare_heads(qkv, positions, constants, other, slots), want, "queries")
    assert_same(other, one, "pages")
    moved = prepare_heads(qkv, positions + 1, constants, other, slots)
    assert first_difference(moved, want)
