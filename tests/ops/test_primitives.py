"""The owned primitives: C++ against the definition by bits, errors against float64, and every input by a sweep."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from samebits import _cpu
from samebits.arithmetic import canonical_nan, exp2, fma, round_bf16, sigmoid, sqrt
from samebits.bits import assert_same
from samebits.testing.sweep import PROMISES, broken


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


def logarithm(x: torch.Tensor) -> torch.Tensor:
    """What the log-sum-exp makes of a sum of one term x; NaN for what is no sum."""
    from samebits.ops.logprob.reference import lse64

    significand, exponent = torch.frexp(torch.where((x > 0) & (x < torch.inf), x, 1.0).double())
    exponent = exponent.long() - 1
    states = torch.zeros(len(x), 5, dtype=torch.int64)
    states[:, 0] = exponent >> 4
    states[:, 1] = (significand * 2.0**24).long() << (exponent & 15)
    return torch.where((x > 0) & (x < torch.inf), lse64(states).float(), torch.nan)


DEFINITIONS = [
    (0, exp2),
    (1, sigmoid),
    (2, sqrt),
    (3, lambda x: round_bf16(x).float()),
    (4, lambda x: canonical_nan(1.0 / x)),
    (5, lambda x: canonical_nan(x / torch.tensor(0.7))),
    (6, lambda x: logarithm(x)),
]


@pytest.mark.parametrize("isa", ["scalar", "avx2", "best"])
@pytest.mark.parametrize(("which", "definition"), DEFINITIONS)
def test_compiled_form_gives_the_reference_bits(isa: str, which: int, definition, instruction_set) -> None:
    instruction_set(isa)
    x = samples()
    assert_same(compiled(which, x), definition(x))


@pytest.mark.parametrize("promise", PROMISES, ids=lambda p: p.name)
def test_promises_hold_over_a_part_of_all_inputs(promise) -> None:
    """70 million inputs of every size; `python -m samebits.testing.sweep` takes all 2^32."""
    assert broken(promise, 61) == []


def test_the_logarithm_of_one_term_is_accurate_and_monotone_over_a_part_of_all_inputs() -> None:
    digest, error, _, decreases, _ = _cpu.sweep(6, 0, 61)
    assert error < 0.5001
    assert decreases == 0
    assert digest == 0x6C55817D35D2B5B9


def test_a_broken_promise_is_noticed() -> None:
    promise = PROMISES[0]
    digest, decreases = promise.digests[61]
    wrong = replace(promise, code=1, error=0.5, digests={61: (digest ^ 1, decreases)})
    assert [line.split()[1] for line in broken(wrong, 61)] == ["error", "176", "digest"]


def test_exp2_is_accurate() -> None:
    x = torch.linspace(-125.9, 127.9, 1_000_003)
    exact = torch.exp2(x.double())
    ulp = 2.0 ** (torch.floor(torch.log2(exact)) - 23)
    assert ((exp2(x).double() - exact).abs() / ulp).max() < 0.911


def test_division_is_correctly_rounded() -> None:
    g = torch.Generator().manual_seed(2)
    x, d = (torch.randint(-(2**31), 2**31, (4096,), generator=g).to(torch.int32).view(torch.float32) for _ in range(2))
    compared = 0
    for a, b, quotient in zip(x.tolist(), d.tolist(), (x / d).tolist(), strict=True):
        if not (math.isfinite(a) and math.isfinite(b) and b != 0 and math.isfinite(quotient)):
            continue
        compared += 1
        below, above = (
            Fraction(
                torch.nextafter(torch.tensor(quotient), torch.tensor(end)).double().clamp(-(2.0**128), 2.0**128).item()
            )
            for end in (-float("inf"), float("inf"))
        )
        error = abs(Fraction(a) / Fraction(b) - Fraction(quotient))
        assert 2 * error <= min(above - Fraction(quotient), Fraction(quotient) - below), (a, b)
    assert compared > 2000


def test_float64_logarithm_of_the_log_sum_exp_is_accurate() -> None:
    from samebits.ops.logprob.reference import lse64

    g = torch.Generator().manual_seed(3)
    sums = torch.randint(1, 2**59, (4096,), generator=g)
    sums[:3] = torch.tensor([1, 2**58, 2**23])
    states = torch.zeros(4096, 5, dtype=torch.int64)
    states[:, 1] = sums  # window 0, the three windows below empty
    exact = torch.tensor([math.log(s) - 23 * math.log(2) for s in sums.tolist()], dtype=torch.float64)
    assert (lse64(states) - exact).abs().max() < 1e-13


def test_fma_rounds_once() -> None:
    # (1 + 2^-12)^2 - 1 - 2^-11 = 2^-24 exactly; a rounded product would give 0
    a = torch.tensor([1 + 2.0**-12])
    assert fma(a, a, -(1 + 2.0**-11) * torch.ones(1)).item() == 2.0**-24
    assert (a * a - (1 + 2.0**-11)).item() == 0.0
