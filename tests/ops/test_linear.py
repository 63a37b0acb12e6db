"""The linear map: kernels against the definition, by bits."""

import pytest
import torch
from torch import Tensor

from samebits import _cpu
from samebits.arithmetic import dot
from samebits.bits import assert_same, first_difference, raw
from samebits.ops.linear import dgrad, linear, linear_partial, matmul_f32, wgrad

ISAS = ["scalar", "avx2", "best"]
ROWS = [1, 2, 3, 7, 8, 16, 17, 64, 256]
SHAPES = [(1, 1), (5, 64), (33, 300), (100, 37), (130, 64)]  # (N, K): one, odd, across panels and blocks of K


def tensors(rows: int, columns: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=g).bfloat16()
    weight = torch.randn(columns, width, generator=g).bfloat16()
    return x, weight, torch.randn(columns, generator=g).bfloat16()


def sprinkled(rows: int, width: int, seed: int) -> Tensor:
    """Random rows with subnormals, values that under- and overflow in products, both zeros, infinities, NaN."""
    g = torch.Generator().manual_seed(seed)
    tiny = torch.randn(rows, width, generator=g) * 2.0 ** torch.randint(-75, -60, (rows, width), generator=g)
    huge = torch.randn(rows, width, generator=g) * 2.0 ** torch.randint(60, 66, (rows, width), generator=g)
    values = torch.where(torch.arange(rows)[:, None] % 2 == 0, tiny, huge).bfloat16()
    patterns = (0x0001, 0x8001, 0x007F, 0x0000, 0x8000, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC1, 0xFF81)
    special = torch.tensor([p - 0x10000 * (p > 0x7FFF) for p in patterns], dtype=torch.int16)
    chosen = special[torch.randint(0, len(special), (rows, width), generator=g)].view(torch.bfloat16)
    # some rows have none of them, so that finite sums stay
    where = (torch.rand(rows, width, generator=g) < 0.02) & (torch.arange(rows)[:, None] % 4 > 1)
    return torch.where(where, chosen, values)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", ROWS)
def test_forward_gives_the_reference_bits(isa: str, rows: int, instruction_set) -> None:
    instruction_set(isa)
    for columns, width in SHAPES:
        x, weight, bias = tensors(rows, columns, width)
        assert_same(linear(x, weight, bias), linear(x, weight, bias, backend="reference"))
        assert_same(matmul_f32(x, weight), matmul_f32(x, weight, backend="reference"))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("segments", [1, 2, 4, 8])
def test_segments_give_the_reference_bits(isa: str, segments: int, instruction_set) -> None:
    instruction_set(isa)
    for rows, columns, width in [(256, 33, 264), (3, 130, 600), (17, 1, 8)]:
        x, weight, bias = tensors(rows, columns, width)
        assert_same(linear(x, weight, bias, segments), linear(x, weight, bias, segments, backend="reference"))
        partial = linear_partial(x, weight, segments)
        assert_same(partial, linear_partial(x, weight, segments, backend="reference"))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 7, 16, 256, 300])
def test_gradients_give_the_reference_bits(isa: str, rows: int, instruction_set) -> None:
    instruction_set(isa)
    for columns, width in SHAPES:
        x, weight, _ = tensors(rows, columns, width)
        dy = tensors(rows, 1, columns, seed=1)[0]
        for dtype in (torch.bfloat16, torch.float32):
            assert_same(dgrad(dy, weight, dtype), dgrad(dy, weight, dtype, backend="reference"))
        buffer = torch.randn(columns, width)
        want = buffer.clone()
        wgrad(dy, x, buffer)
        wgrad(dy, x, want, backend="reference")
        assert_same(buffer, want)


@pytest.mark.parametrize("isa", ISAS)
def test_extreme_values_give_the_reference_bits(isa: str, instruction_set) -> None:
    instruction_set(isa)
    x, weight, dy = sprinkled(256, 40, 1), sprinkled(24, 40, 2), sprinkled(256, 24, 3)
    for segments in (1, 2):
        y, total = linear(x, weight, segments=segments), linear_partial(x, weight, segments)
        assert_same(y, linear(x, weight, segments=segments, backend="reference"))
        assert_same(total, linear_partial(x, weight, segments, backend="reference"))
        assert set(raw(y)[y.isnan()].tolist()) == {0x7FC0}
        assert set(raw(total)[total.isnan()].tolist()) == {0x7FC00000}
        magnitude = total.abs()
        assert bool(((magnitude > 0) & (magnitude < 2.0**-126)).any()), "no subnormal sum was tried"
        assert bool(total.isinf().any())
    assert_same(dgrad(dy, weight), dgrad(dy, weight, backend="reference"))
    buffers = [torch.zeros(24, 40), torch.zeros(24, 40)]
    for buffer, backend in zip(buffers, ("cpu", "reference"), strict=True):
        wgrad(dy, x, buffer, backend=backend)
    assert_same(*buffers)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_rows_do_not_depend_on_batch_or_threads(threads: int) -> None:
    x, weight, bias = tensors(256, 300, 520)
    dy = tensors(256, 1, 300, seed=1)[0]
    _cpu.set_threads(threads)
    try:
        whole, gradient, grown = linear(x, weight, bias, 2), dgrad(dy, weight), torch.zeros(300, 520)
        wgrad(dy, x, grown)
    finally:
        _cpu.set_threads(0)
    assert_same(whole, torch.cat([linear(row[None], weight, bias, 2) for row in x]))
    assert_same(whole, torch.cat([linear(part, weight, bias, 2) for part in x.split([3, 16, 29, 100, 108])]))
    assert_same(gradient, torch.cat([dgrad(row[None], weight) for row in dy]))
    assert_same(whole[:, 17:50], linear(x, weight[17:50], bias[17:50], 2))
    once = torch.zeros(300, 520)
    wgrad(dy, x, once)
    assert_same(grown, once)


def test_large_shapes_give_the_reference_bits() -> None:
    # past every block size: 512 columns, 224 rows, 256 of K; the definition on a few rows and columns
    x, weight, _ = tensors(460, 1100, 700)
    y = matmul_f32(x, weight)
    some = torch.tensor([0, 13, 14, 223, 224, 447, 448, 459])
    assert_same(y[some], dot(x[some], weight))
    assert_same(y[:, 500:530].contiguous(), dot(x, weight[500:530]))


def test_strided_inputs_give_the_same_bits() -> None:
    x, weight, bias = tensors(256, 70, 96)
    wide = torch.full((256, 200), float("nan"), dtype=torch.bfloat16)
    wide[:, 40:136] = x
    tall = torch.full((70, 160), float("nan"), dtype=torch.bfloat16)
    tall[:, 8:104] = weight
    want = linear(x, weight, bias, 4)
    assert_same(linear(wide[:, 40:136], tall[:, 8:104], bias, 4), want)
    assert_same(linear(x.t().contiguous().t(), weight.t().contiguous().t(), bias, 4), want)
    assert_same(linear(x.view(4, 64, 96), weight, bias, 4), want.view(4, 64, 70))
    assert_same(linear(x[:0], weight, bias), want[:0])


@pytest.mark.parametrize("segments", [2, 4, 8])
def test_ranks_finish_the_same_tree(segments: int) -> None:
    x, weight, bias = tensors(256, 65, 128)
    halves = [linear_partial(x[:, part], weight[:, part], segments // 2) for part in (slice(0, 64), slice(64, 128))]
    assert_same(linear_partial(x, weight, segments), halves[0] + halves[1])
    assert_same(linear(x, weight, bias, segments), (halves[0] + halves[1] + bias.float()).bfloat16())


@pytest.mark.parametrize("cuts", [[256], [1, 255], [100, 100, 56], [1] * 256])
def test_weight_gradients_do_not_depend_on_the_micro_batch(cuts: list[int]) -> None:
    x, weight, bias = tensors(256, 40, 72)
    dy = tensors(256, 1, 40, seed=1)[0]
    weight, bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    weight.main_grad, bias.main_grad = torch.ones(40, 72), torch.ones(40)
    for part, gradient in zip(x.split(cuts), dy.split(cuts), strict=True):
        linear(part, weight, bias).backward(gradient)
    assert weight.grad_added_to_main_grad
    assert weight.grad is not None
    assert_same(weight.main_grad, dot(dy.t(), x.t(), torch.ones(40, 72)))
    total = torch.ones(40)
    for row in dy.float():
        total = total + row
    assert_same(bias.main_grad, total)


@pytest.mark.parametrize("call", ["linear", "linear_partial", "matmul_f32"])
def test_autograd_gives_the_reference_bits(call: str) -> None:
    grads = {}
    for backend in ("cpu", "reference"):
        x, weight, bias = (t.requires_grad_() for t in tensors(256, 40, 72))
        if call == "linear_partial":
            y, leaves = linear_partial(x, weight, 2, backend=backend), (x, weight)
        else:
            y = {"linear": linear, "matmul_f32": matmul_f32}[call](x, weight, bias, backend=backend)
            leaves = (x, weight, bias)
        y.backward(tensors(256, 1, 40, seed=1)[0].to(y.dtype) * 1.001)
        grads[backend] = [t.grad for t in leaves]
    for got, want in zip(grads["cpu"], grads["reference"], strict=True):
        assert_same(got, want)


def test_close_to_float64() -> None:
    x, weight, bias = tensors(256, 90, 300)
    dy = tensors(256, 1, 90, seed=1)[0]
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    exact = torch.nn.functional.linear(*leaves)
    exact.backward(dy.double())
    own = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = linear(*own, segments=4)
    y.backward(dy)
    for got, want in [(y, exact), *((o.grad, e.grad) for o, e in zip(own, leaves, strict=True))]:
        error = (got.double() - want).abs()
        assert bool((error <= 2**-8 * want.abs() + 2**-16 * want.abs().max()).all())


def test_only_wanted_gradients_are_computed() -> None:
    x, weight, _ = tensors(8, 40, 72)
    weight.requires_grad_()
    before = _cpu.counters()
    linear(x, weight).sum().backward()
    after = _cpu.counters()
    assert after["linear_wgrad"] == before["linear_wgrad"] + 1
    assert after["linear_dgrad"] == before["linear_dgrad"]


def test_other_orders_would_be_noticed() -> None:
    x, weight, _ = tensors(256, 33, 512)
    y = matmul_f32(x, weight)
    assert_same(y, dot(x, weight))
    assert first_difference(y, dot(x.flip(1), weight.flip(1))) is not None, "descending k"
    assert first_difference(y, torch.nn.functional.linear(x.float(), weight.float())) is not None
    assert first_difference(y, linear_partial(x, weight, 2)) is not None, "one more segment"
    parts = [dot(x[:, at : at + 128], weight[:, at : at + 128]) for at in range(0, 512, 128)]
    tree = linear_partial(x, weight, 4)
    assert_same(tree, (parts[0] + parts[1]) + (parts[2] + parts[3]))
    assert first_difference(tree, ((parts[0] + parts[1]) + parts[2]) + parts[3]) is not None, "a chain"
    assert first_difference(tree, (parts[0] + parts[2]) + (parts[1] + parts[3])) is not None, "not neighbours"


def test_the_reference_is_a_fused_product_where_products_are_inexact() -> None:
    # half of the smallest subnormal: alone it rounds to 0, on top of one smallest subnormal the tie goes up to two
    x = torch.tensor([[2.0**-75, 2.0**-75]]).bfloat16()
    weight = torch.tensor([[2.0**-74, 2.0**-75]]).bfloat16()
    assert_same(dot(x, weight), torch.tensor([[2.0**-148]]))
    assert_same(linear_partial(x, weight), torch.tensor([[2.0**-148]]))


def test_wrong_arguments_are_named() -> None:
    x, weight, bias = tensors(2, 4, 12)
    with pytest.raises(ValueError, match=r"bfloat16, got torch\.float32"):
        linear(x.float(), weight)
    with pytest.raises(ValueError, match=r"do not match: \[2, 11\] and \[4, 12\]"):
        linear(x[:, :11], weight)
    with pytest.raises(ValueError, match=r"bias must be contiguous bfloat16 \[4\]"):
        linear(x, weight, bias[:3])
    for segments in (0, 3, 8, -2):
        with pytest.raises(ValueError, match=f"power of two that divides K = 12, got {segments}"):
            linear(x, weight, segments=segments)
    with pytest.raises(ValueError, match="contiguous float32"):
        wgrad(x, x, torch.zeros(12, 12).bfloat16())
    with pytest.raises(ValueError, match="no backend 'mkl'; it has cpu, reference"):
        linear(x, weight, backend="mkl")
