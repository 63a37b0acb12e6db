"""The Triton linear kernels against their definition, for every launch that a shape may get."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from samebits.arithmetic import dot
from samebits.backends import device_arithmetic
from samebits.bits import assert_same, first_difference
from samebits.ops.linear import BACKENDS, dgrad, linear, linear_partial, matmul_f32, wgrad
from samebits.ops.linear.launch import Launch, launch
from samebits.testing.dot_inputs import DISTRIBUTIONS, draw

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: run `python -m pytest tests/gpu` on a machine with one"
)

LAUNCHES = [
    Launch("persistent", 128, 256, 64, 8, 3),
    Launch("persistent", 128, 256, 64, 8, 4),
    Launch("persistent", 128, 128, 64, 8, 4),
    Launch("persistent", 64, 128, 64, 4, 3, per_sm=2),
    Launch("persistent", 64, 32, 256, 4, 4),
    Launch("persistent", 64, 256, 64, 4, 4),
    Launch("tile", 128, 128, 64, 8, 4),
    Launch("tile", 128, 256, 64, 8, 3),
    Launch("tile", 128, 128, 64, 4, 3),
    Launch("any", 64, 64, 32, 4, 3),
    Launch("any", 32, 128, 64, 4, 2),
    Launch("any", 16, 16, 256, 4, 4, swapped=True),
    Launch("any", 16, 32, 256, 4, 4, swapped=True),
    Launch("any", 16, 16, 512, 2, 4, swapped=True, repeat=True),
    Launch("any", 64, 64, 128, 4, 4, swapped=True),
]


def arithmetic() -> str:
    return device_arithmetic(torch.device("cuda", 0))


def on_card(name: str, rows: int, outs: int, depth: int) -> tuple[Tensor, Tensor, Tensor | None]:
    a, b, acc = draw(name, rows, outs, depth, seed=7)
    return a.cuda(), b.cuda(), None if acc is None else acc.cuda()


def product(a: Tensor, b: Tensor, how: Launch, start: Tensor | None = None, segments: int = 1) -> Tensor:
    out = torch.full((a.shape[0], b.shape[0]), float("nan"), device="cuda") if start is None else start.clone()
    BACKENDS["triton"].matmul(a, b, out, arithmetic(), segments=segments, keep_c=start is not None, how=how)
    return out


@pytest.mark.parametrize("how", LAUNCHES, ids=lambda how: how.name)
def test_every_launch_gives_the_bits_of_the_definition(how: Launch) -> None:
    definition = BACKENDS["reference"]
    for name in DISTRIBUTIONS:
        a, b, acc = on_card(name, 300, 264, 328)
        assert_same(product(a, b, how), definition.forward(a, b, None, 1, torch.float32, arithmetic()), name)
        if how.kernel != "persistent" and acc is not None:
            want = acc.clone()
            definition.wgrad(a.t(), b.t(), want, arithmetic())
            assert_same(product(a, b, how, acc), want, f"{name}, continued")


@pytest.mark.parametrize("rows", [1, 5, 17])
def test_few_rows_of_whole_tiles(rows: int) -> None:
    for name in DISTRIBUTIONS:
        a, b, _ = on_card(name, rows, 264, 1024)
        want = BACKENDS["reference"].forward(a, b, None, 1, torch.float32, arithmetic())
        assert_same(matmul_f32(a, b), want, name)
        for how in LAUNCHES:
            if how.swapped and how.block_m >= rows:
                assert_same(product(a, b, how), want, f"{name} {how.name}")


@pytest.mark.parametrize("how", LAUNCHES, ids=lambda how: how.name)
def test_factors_stored_the_other_way_round(how: Launch) -> None:
    a, b, _ = on_card("wide_exponents", 264, 280, 200)
    want = BACKENDS["reference"].forward(a, b, None, 1, torch.float32, arithmetic())
    for left in (a, a.t().contiguous().t()):
        for right in (b, b.t().contiguous().t()):
            assert_same(product(left, right, how), want, f"{left.stride()} {right.stride()}")


@pytest.mark.parametrize("segments", [2, 4, 8])
def test_segments_follow_the_tree(segments: int) -> None:
    a, b, _ = on_card("cancellation", 300, 264, 1024)
    want = BACKENDS["reference"].forward(a, b, None, segments, torch.float32, arithmetic())
    for how in LAUNCHES:
        spills = how.kernel == "tile" and how.block_n > 128
        if how.kernel == "any" or (how.kernel == "tile" and not spills and 1024 // segments % how.block_k == 0):
            assert_same(product(a, b, how, segments=segments), want, how.name)


@pytest.mark.parametrize("kind", ["sm90", "fma32"])
@pytest.mark.parametrize("rows", [1, 3, 16, 33, 64, 65, 257, 600])
def test_public_functions(rows: int, kind: str) -> None:
    if kind != "fma32" and kind != arithmetic():
        pytest.skip(f"this device computes in {arithmetic()}, not in {kind}")
    for outs, depth, segments in ((100, 67, 1), (256, 512, 1), (256, 512, 4), (264, 1536, 2)):
        x, weight, _ = on_card("normal", rows, outs, depth)
        bias = weight[:, 0].contiguous()
        for function in (linear, linear_partial):
            options = {"segments": segments, "arithmetic": kind}
            more = {"bias": bias} if function is linear else {}
            got = function(x, weight, **more, **options)
            assert_same(got, function(x, weight, **more, **options, backend="reference"), f"{function} {outs} {depth}")
        dy = x[:, :1] * weight[:, 0]
        for dtype in (torch.bfloat16, torch.float32):
            want = dgrad(dy, weight, dtype, backend="reference", arithmetic=kind)
            assert_same(dgrad(dy, weight, dtype, arithmetic=kind), want, f"dgrad {outs} {depth}")
        got = torch.randn(outs, depth, generator=torch.Generator().manual_seed(1)).cuda()
        want = got.clone()
        wgrad(dy, x, got, arithmetic=kind)
        wgrad(dy, x, want, backend="reference", arithmetic=kind)
        assert_same(got, want, f"wgrad {outs} {depth}")


def test_gradients_of_weight_and_bias_continue_main_grad() -> None:
    x, weight, _ = on_card("normal", 300, 130, 96)
    results = []
    for backend in ("triton", "reference"):
        leaves = [t.clone().requires_grad_() for t in (x, weight, weight[:, 0].contiguous())]
        for leaf in leaves[1:]:
            leaf.main_grad = torch.full(leaf.shape, 0.3, device="cuda")
        linear(*leaves, backend=backend).backward(torch.ones(300, 130, device="cuda").bfloat16() * 0.7)
        results.append([leaves[0].grad, *(leaf.main_grad for leaf in leaves[1:])])
    for got, want in zip(*results, strict=True):
        assert_same(got, want)


def test_batch_and_split_never_show() -> None:
    x, weight, _ = on_card("normal", 600, 4096, 4096)
    whole = matmul_f32(x, weight)
    for rows in (1, 7, 16, 40, 64, 128, 300):
        assert_same(matmul_f32(x[:rows], weight), whole[:rows], f"{rows} rows")


def test_processor_and_card_agree() -> None:
    """Also where the compiled CPU kernels are not built: the definition runs on the processor, too."""
    form = "cpu" if importlib.util.find_spec("samebits._cpu") is not None else "reference"
    a, b, _ = draw("normal", 256, 96, 512, seed=9)
    for kind in {"fma32", arithmetic()}:
        assert_same(matmul_f32(a.cuda(), b.cuda(), arithmetic=kind).cpu(), dot(a, b, None, kind, form), kind)


def test_a_seeded_fault_is_seen() -> None:
    """Another order of k, and a segment too many, must show in these inputs."""
    a, b, _ = on_card("normal", 300, 264, 512)
    want = BACKENDS["reference"].forward(a, b, None, 1, torch.float32, arithmetic())
    how = replace(LAUNCHES[0])
    order = torch.arange(512, device="cuda").flip(0)
    assert first_difference(product(a[:, order].contiguous(), b[:, order].contiguous(), how), want) is not None
    assert first_difference(product(a, b, LAUNCHES[6], segments=2), want) is not None
    assert first_difference(product(a, b, how), want) is None


def test_replays_of_a_graph_are_counted() -> None:
    from samebits.backends.device_counters import counters

    x, weight, _ = on_card("normal", 16, 256, 256)
    want = linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = linear(x, weight)
    before = counters()["linear.forward"]
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert counters()["linear.forward"] == before + 5
    assert_same(got, want)


def test_the_vendor_serves_certified_shapes_only(monkeypatch) -> None:
    from samebits.ops.linear import vendor

    device = torch.device("cuda", 0)
    x, weight, _ = on_card("normal", 512, 1024, 1024)
    y = torch.empty(512, 1024, device="cuda", dtype=torch.bfloat16)
    want = linear(x, weight)
    assert not vendor.product(x, weight, y)
    certificate = vendor.certify(512, 1024, 1024, device)
    if certificate is not None:
        assert vendor.product(x, weight, y)
        assert_same(y, want)
        assert_same(linear(x, weight), want)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        try:
            assert not vendor.product(x, weight, y), "certified under another setting"
        finally:
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        assert vendor.product(x, weight, y)
    assert not vendor.product(x[:100], weight, y[:100])
    mm = torch.mm

    def split(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """As a library that cuts K in two."""
        half = a.shape[1] // 2
        total = mm(a[:, :half], b[:half], out_dtype=torch.float32) + mm(a[:, half:], b[half:], out_dtype=torch.float32)
        return total.bfloat16() if out is None else out.copy_(total)

    monkeypatch.setattr(torch, "mm", split)
    assert vendor.certify(512, 1024, 1024, device) is None
    assert not vendor.product(x, weight, y)
    vendor.revoke()


def test_launches_are_a_function_of_the_shape() -> None:
    assert launch(8192, 4096, 4096) == launch(8192, 4096, 4096)
    assert launch(1, 4096, 4096).swapped
