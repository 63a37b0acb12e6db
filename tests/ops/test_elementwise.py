"""Rotary, SwiGLU and embedding: kernels against the definitions, by bits."""

import numpy as np
import pytest
import torch
from mpmath import mp

from samebits.bits import assert_same, first_difference
from samebits.ops.embedding import embedding
from samebits.ops.rotary import rotary, rotary_table
from samebits.ops.swiglu import swiglu

ROWS = 256
ISAS = ["scalar", "avx2", "best"]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def gradients(function, *inputs: torch.Tensor, backend: str) -> list[torch.Tensor]:
    leaves = [t.clone().requires_grad_() for t in inputs]
    y = function(*leaves, backend=backend)
    y.backward(randn(*y.shape, seed=5))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [2, 6, 64, 80, 128])
def test_rotary_bits(isa: str, width: int, instruction_set) -> None:
    instruction_set(isa)
    cos, sin = rotary_table(width, 10_000.0, 300)
    positions = torch.arange(ROWS) % 299
    wide = randn(ROWS, 5, width + 3)
    x = wide[:, 1:4, :width]

    def turn(t: torch.Tensor, backend: str) -> torch.Tensor:
        return rotary(t, positions, cos, sin, backend=backend)

    want = gradients(turn, x, backend="reference")
    for a, b in zip(gradients(turn, x, backend="cpu"), want, strict=True):
        assert_same(a, b)
    assert_same(rotary(x, positions, cos, sin), rotary(x.contiguous(), positions.int(), cos, sin))


@pytest.mark.parametrize("base", [10_000.0, 1_000_000.0])
def test_rotary_table_is_correctly_rounded(base: float) -> None:
    cos, sin = rotary_table(64, base, 40_960)
    rng = np.random.default_rng(0)
    with mp.workdps(40):
        for p, i in zip(rng.integers(0, 40_960, 300), rng.integers(0, 32, 300), strict=True):
            angle = mp.mpf(int(p)) * mp.mpf(base) ** (mp.mpf(-2 * int(i)) / 64)
            for table, exact in ((cos, mp.cos(angle)), (sin, mp.sin(angle))):
                assert abs(table[p, i].item() - float(exact)) <= 2.0**-24 * abs(float(exact)) * 1.01 + 1e-11


def test_a_position_outside_the_table_is_an_error() -> None:
    cos, sin = rotary_table(4, 10_000.0, 8)
    with pytest.raises(IndexError, match="outside the table"):
        rotary(randn(2, 1, 4), torch.tensor([0, 8]), cos, sin)


def test_positions_are_whole_numbers() -> None:
    cos, sin = rotary_table(4, 10_000.0, 8)
    with pytest.raises(ValueError, match="positions must be int32 or int64, got torch"):
        rotary(randn(2, 1, 4), torch.tensor([0.0, 1.0]), cos, sin)


def test_contracted_rotary_would_be_noticed() -> None:
    from samebits.arithmetic import fma

    cos, sin = rotary_table(64, 10_000.0, ROWS)
    x = randn(ROWS, 64).float()
    x1, x2 = x.chunk(2, -1)
    assert first_difference(x1 * cos - x2 * sin, fma(x1, cos, -(x2 * sin))) is not None


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [1, 17, 384])
def test_swiglu_bits(isa: str, width: int, instruction_set) -> None:
    instruction_set(isa)
    x = 4 * randn(ROWS, 2 * width)
    x[0, 0], x[1, 0], x[2, 0] = float("inf"), -float("inf"), float("nan")
    for got, want in zip(gradients(swiglu, x, backend="cpu"), gradients(swiglu, x, backend="reference"), strict=True):
        assert_same(got, want)


def test_swiglu_is_accurate() -> None:
    x = 4 * randn(ROWS, 128)
    gate, up = x.double().chunk(2, -1)
    exact = gate * torch.sigmoid(gate) * up
    assert ((swiglu(x).double() - exact).abs() / exact.abs().clamp_min(1e-30)).max() < 2**-8 * 1.01


@pytest.mark.parametrize("isa", ISAS)
def test_embedding_bits(isa: str, instruction_set) -> None:
    instruction_set(isa)
    ids = torch.randint(0, 60, (4, 64), generator=torch.Generator().manual_seed(2))
    table = randn(40, 72)

    def look_up(weight: torch.Tensor, backend: str) -> torch.Tensor:
        return embedding(ids, weight, start=10, backend=backend)

    got, want = gradients(look_up, table, backend="cpu"), gradients(look_up, table, backend="reference")
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)
    owned = (ids >= 10) & (ids < 50)
    assert_same(got[0][owned], table[ids[owned] - 10])
    assert not got[0][~owned].any()


def test_weight_gradient_does_not_depend_on_micro_batches() -> None:
    ids = torch.randint(0, 40, (ROWS,), generator=torch.Generator().manual_seed(2))
    dy = randn(ROWS, 32, seed=3)
    buffers = []
    for pieces in (1, 3, ROWS):
        weight = randn(40, 32).requires_grad_()
        weight.main_grad = torch.zeros(40, 32)
        for part_ids, part_dy in zip(ids.chunk(pieces), dy.chunk(pieces), strict=True):
            embedding(part_ids, weight).backward(part_dy)
        assert weight.grad_added_to_main_grad
        buffers.append(weight.main_grad)
    assert_same(buffers[0], buffers[1])
    assert_same(buffers[0], buffers[2])
