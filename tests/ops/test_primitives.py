"""exp2 and sigmoid: the C++ form against the definition by bits, and against float64 for accuracy."""

import pytest
import torch

from samebits import _cpu
from samebits.arithmetic import exp2, fma, sigmoid
from samebits.bits import assert_same


def compiled(which: int, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    _cpu.primitive(which, x.data_ptr(), y.data_ptr(), x.numel())
    return y


def samples() -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    patterns = torch.randint(-(2**31), 2**31, (1 << 20,), generator=g).to(torch.int32).view(torch.float32)
    special = torch.tensor([0.0, -0.0, 1.0, -126.0, -126.5, -149.0, -149.5, -150.0, 127.9, 128.0])
    edge = torch.tensor([-1e38, 1e38, float("inf"), -float("inf"), float("nan"), 0.5, -0.5, 1.5, 2.5])
    return torch.cat([patterns, torch.linspace(-160, 130, 200_003), special, edge])


@pytest.mark.parametrize("isa", ["scalar", "avx2", "best"])
@pytest.mark.parametrize(("which", "definition"), [(0, exp2), (1, sigmoid)])
def test_compiled_form_gives_the_reference_bits(isa: str, which: int, definition, instruction_set) -> None:
    instruction_set(isa)
    x = samples()
    assert_same(compiled(which, x), definition(x))


def test_exp2_is_accurate() -> None:
    x = torch.linspace(-125.9, 127.9, 1_000_003)
    exact = torch.exp2(x.double())
    ulp = 2.0 ** (torch.floor(torch.log2(exact)) - 23)
    assert ((exp2(x).double() - exact).abs() / ulp).max() < 1.0


def test_fma_rounds_once() -> None:
    # (1 + 2^-12)^2 - 1 - 2^-11 = 2^-24 exactly; a rounded product would give 0
    a = torch.tensor([1 + 2.0**-12])
    assert fma(a, a, -(1 + 2.0**-11) * torch.ones(1)).item() == 2.0**-24
    assert (a * a - (1 + 2.0**-11)).item() == 0.0
