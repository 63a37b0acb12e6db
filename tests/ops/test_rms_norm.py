"""RMSNorm: kernels against the definition, by bits."""

import pytest
import torch

from samebits import _cpu
from samebits.bits import assert_same, first_difference
from samebits.ops.rms_norm import add_rms_norm, rms_norm

WIDTHS = [1, 5, 64, 127, 128, 1000, 1024]
ROWS = 256


def rows_of(width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, width, generator=g).bfloat16()
    residual = torch.randn(ROWS, width, generator=g).bfloat16()
    weight = (1 + 0.3 * torch.randn(width, generator=g)).bfloat16()
    return x, residual, weight


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("isa", ["scalar", "avx2", "best"])
def test_kernel_gives_the_reference_bits(width: int, isa: str, instruction_set) -> None:
    x, residual, weight = rows_of(width)
    instruction_set(isa)
    assert_same(rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6, backend="reference"))
    for got, want in zip(
        add_rms_norm(x, residual, weight, 1e-6),
        add_rms_norm(x, residual, weight, 1e-6, backend="reference"),
        strict=True,
    ):
        assert_same(got, want)


@pytest.mark.parametrize("width", [64, 128, 1000])
def test_backward_gives_the_reference_bits(width: int) -> None:
    grads = {}
    for backend in ("cpu", "reference"):
        x, residual, weight = rows_of(width)
        for t in (x, residual, weight):
            t.requires_grad_()
        y, total = add_rms_norm(x, residual, weight, 1e-6, backend=backend)
        g = torch.Generator().manual_seed(9)
        dy = torch.randn(y.shape, generator=g).bfloat16()
        torch.autograd.backward([y, total], [dy, dy.flip(0)])
        grads[backend] = (x.grad, residual.grad, weight.grad)
    for got, want in zip(grads["cpu"], grads["reference"], strict=True):
        assert_same(got, want)


def test_rows_do_not_depend_on_the_batch() -> None:
    x, _, weight = rows_of(1000)
    whole = rms_norm(x, weight, 1e-6)
    _cpu.set_threads(1)
    try:
        single = torch.cat([rms_norm(row[None], weight, 1e-6) for row in x])
    finally:
        _cpu.set_threads(0)
    assert_same(whole, single)


def test_a_strided_input_gives_the_same_bits() -> None:
    x, _, weight = rows_of(128)
    wide = torch.full((ROWS, 200), float("nan"), dtype=torch.bfloat16)
    wide[:, 40:168] = x
    assert_same(rms_norm(wide[:, 40:168], weight, 1e-6), rms_norm(x, weight, 1e-6))


def test_close_to_float64() -> None:
    x, _, weight = rows_of(1000)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    error = (rms_norm(x, weight, 1e-6).double() - exact).abs() / exact.abs().clamp_min(1e-6)
    assert error.max() <= 2**-8 * 1.001


def test_other_lanes_would_be_noticed() -> None:
    from samebits.arithmetic import lane_dot

    x = rows_of(1000)[0].float()
    assert first_difference(lane_dot(x, x, 128), lane_dot(x, x, 64)) is not None
    assert first_difference(lane_dot(x, x, 128), x.square().sum(-1)) is not None


def test_wrong_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="must be bfloat16"):
        rms_norm(torch.zeros(2, 4), torch.zeros(4).bfloat16(), 1e-6)
