"""Dot products in every arithmetic: the compiled form against the definition, and the definition against itself."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits import _cpu
from samebits.arithmetic import cdna3, dot, sm90
from samebits.bits import assert_same, first_difference
from samebits.testing.dot_inputs import DISTRIBUTIONS, draw

ARITHMETICS = ["fma32", "sm90", "cdna3"]
ROWS, COLUMNS, DEPTH = 256, 19, 45  # parts of tiles and of groups


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The definitions are many small steps: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def defined(name: str, arithmetic: str) -> torch.Tensor:
    return dot(*draw(name, ROWS, COLUMNS, DEPTH, seed=3), arithmetic)


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_compiled_form_gives_the_bits_of_the_definition(name: str, isa: str, instruction_set) -> None:
    instruction_set(isa)
    a, b, acc = draw(name, ROWS, COLUMNS, DEPTH, seed=3)
    for arithmetic in ARITHMETICS:
        assert_same(dot(a, b, acc, arithmetic, backend="cpu"), defined(name, arithmetic), f"{name} {arithmetic}")


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_long_rows_continue_over_tiles(arithmetic: str) -> None:
    a, b, acc = draw("wide_exponents", 256, 2, 600)
    whole = dot(a, b, acc, arithmetic, backend="cpu")
    assert_same(whole, dot(a, b, acc, arithmetic))
    # K cut at a multiple of the group: the second part continues the first
    first = dot(a[:, :320], b[:, :320], acc, arithmetic, backend="cpu")
    assert_same(whole, dot(a[:, 320:], b[:, 320:], first, arithmetic, backend="cpu"))


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_rows_threads_and_strides_do_not_matter(arithmetic: str) -> None:
    a, b, _ = draw("cancellation", 300, 40, 64)
    whole = dot(a, b, None, arithmetic, backend="cpu")
    alone = torch.cat([dot(a[m : m + 1], b, None, arithmetic, backend="cpu") for m in range(0, 300, 7)])
    assert_same(whole[::7], alone)
    wide = torch.full((300, 100), float("nan"), dtype=torch.bfloat16)
    wide[:, 20:84] = a
    assert_same(whole, dot(wide[:, 20:84], b.t().contiguous().t(), None, arithmetic, backend="cpu"))
    before = _cpu.threads()
    _cpu.set_threads(1)
    single = dot(a, b, None, arithmetic, backend="cpu")
    _cpu.set_threads(before)
    assert_same(whole, single)


@pytest.mark.parametrize("arithmetic", ["sm90", "cdna3"])
def test_missing_products_are_zeros(arithmetic: str) -> None:
    a, b, acc = draw("underflow", 256, 8, 21)
    padding = torch.zeros(256, 11, dtype=torch.bfloat16)
    longer = dot(torch.cat([a, padding], 1), torch.cat([b, padding[:8]], 1), acc, arithmetic)
    assert_same(dot(a, b, acc, arithmetic), longer)


def test_no_products_leave_the_start() -> None:
    empty = torch.zeros(3, 0, dtype=torch.bfloat16)
    acc = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    for arithmetic in ARITHMETICS:
        for backend in ("reference", "cpu"):
            assert_same(dot(empty, empty, acc, arithmetic, backend), acc)


def test_corners_of_sm90() -> None:
    def one(products: list[tuple[float, float]], start: float = 0.0) -> tuple[float, int]:
        a, b = (torch.tensor([[p[i] for p in products]], dtype=torch.bfloat16) for i in (0, 1))
        value = sm90.dot(a, b, torch.tensor([[start]]))
        return value.item(), int(value.view(torch.int32)) & 0xFFFFFFFF

    inf = float("inf")
    assert one([(-0.0, 1.0)], -0.0)[1] == 0
    assert one([(-(2.0**-80), 2.0**-80)])[1] == 0
    assert one([(2.0**64, 2.0**64)])[0] == inf
    assert one([(2.0**64, 2.0**64), (-(2.0**64), 2.0**63)])[0] == 2.0**127
    assert one([(inf, 0.0)])[1] == one([(inf, 1.0)], -inf)[1] == one([(float("nan"), 1.0)])[1] == 0x7FFFFFFF
    # cut off toward zero at 25 fractional bits of the largest exponent, on both sides of zero
    assert one([(1.0, 1.0), (2.0**-13, 2.0**-13)], -1.0)[0] == 0.0
    assert one([(1.0, 1.0), (2.0**-12, 2.0**-13)], -1.0)[0] == 2.0**-25
    assert one([(1.0, 1.0), (-(2.0**-13), 2.0**-13)], -1.0)[0] == 0.0


# --- the definitions once more, in exact rationals --------------------------------------------------------------------

VALUES = st.integers(0, 0xFFFF).filter(lambda h: (h >> 7) & 0xFF != 0xFF)


def _bf16_value(h: int) -> tuple[Fraction, int]:
    field = (h >> 7) & 0xFF
    exponent = max(field, 1) - 127
    significand = (h & 0x7F) | (0x80 if field else 0)
    return Fraction(-significand if h >> 15 else significand) * Fraction(2) ** (exponent - 7), exponent


def _cut(value: Fraction, bits: int, top: int, down: bool = False) -> Fraction:
    scaled = value / Fraction(2) ** (top - bits)
    whole = (
        scaled.numerator // scaled.denominator if down or scaled >= 0 else -(-scaled.numerator // scaled.denominator)
    )
    return whole * Fraction(2) ** (top - bits)


def _exact_sm90(a: list[int], b: list[int]) -> Fraction:
    terms = []
    for x, y in zip(a, b, strict=True):
        (vx, ex), (vy, ey) = _bf16_value(x), _bf16_value(y)
        if vx * vy != 0:
            terms.append((vx * vy, ex + ey))
    top = max([e for _, e in terms] + [-133])
    return sum((_cut(v, 25, top) for v, _ in terms), Fraction(0))


def _exact_cdna3(a: list[int], b: list[int]) -> Fraction:
    terms = []
    for x, y in zip(a, b, strict=True):
        (vx, ex), (vy, ey) = _bf16_value(x), _bf16_value(y)
        terms.append((vx * vy, ex + ey if vx * vy != 0 else -126))
    peak = max([e for _, e in terms] + ([-126] if len(terms) < 8 else []))
    total = sum((_cut(v, 24, peak) for v, _ in terms), Fraction(0))
    return _cut(total, 31, max(peak, -126), down=True)


def _toward_zero(value: Fraction) -> float:
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = max(size.numerator.bit_length() - size.denominator.bit_length() - 1, -126)
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    kept = _cut(size, 23, exponent)
    if kept >= 2**128:
        return float("inf") if value > 0 else -float("inf")
    return float(kept if value > 0 else -kept)


def _pattern(values: list[int]) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=16))
def test_sm90_against_rationals(pairs: list[tuple[int, int]]) -> None:
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    want = _toward_zero(_exact_sm90(a, b))
    for backend in ("reference", "cpu"):
        got = dot(_pattern(a), _pattern(b), None, "sm90", backend).item()
        assert got == want or (got == 0.0 and want == 0.0)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=8))
def test_cdna3_against_rationals(pairs: list[tuple[int, int]]) -> None:
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    if any(abs(_bf16_value(x)[0] * _bf16_value(y)[0]) >= 2**128 for x, y in pairs):
        return  # infinities: compared by the distributions above
    # a float64 holds the sum exactly, so its conversion is the one rounding to nearest even
    want = torch.tensor(float(_exact_cdna3(a, b)), dtype=torch.float64).float().item()
    for backend in ("reference", "cpu"):
        assert dot(_pattern(a), _pattern(b), None, "cdna3", backend).item() == want


# --- the tests above can fail -----------------------------------------------------------------------------------------


def _nearest(value: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    from samebits.arithmetic.exact import nearest_fp32

    return nearest_fp32(value, unit)


@pytest.mark.parametrize(
    ("attribute", "wrong"),
    [("FRACTION", 24), ("FRACTION", 26), ("GROUP", 32), ("GROUP", 8), ("truncated_fp32", _nearest)],
)
def test_another_sm90_is_noticed(attribute: str, wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, acc = draw("normal", ROWS, COLUMNS, 64)
    monkeypatch.setattr(sm90, attribute, wrong)
    difference = first_difference(dot(a, b, acc, "sm90"), dot(a, b, acc, "sm90", backend="cpu"))
    assert difference is not None
    assert difference.count > 100


@pytest.mark.parametrize(("attribute", "wrong"), [("PRODUCT_FRACTION", 25), ("SUM_FRACTION", 26), ("GROUP", 16)])
def test_another_cdna3_is_noticed(attribute: str, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # large accumulators over small sums: where the last bits of the sum decide the rounding
    a, b, _ = draw("normal", ROWS, COLUMNS, 64)
    acc = 1e3 * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(cdna3, attribute, wrong)
    assert first_difference(dot(a, b, acc, "cdna3"), dot(a, b, acc, "cdna3", backend="cpu")) is not None


def test_refusals_say_what_is_wanted() -> None:
    a = torch.zeros(2, 3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="no arithmetic 'sm100'; there is fma32, sm90, cdna3"):
        dot(a, a, arithmetic="sm100")
    with pytest.raises(ValueError, match="no backend 'gpu'"):
        dot(a, a, backend="gpu")
    with pytest.raises(ValueError, match=r"a and b must be torch.bfloat16, got torch.float32"):
        dot(a.float(), a, arithmetic="sm90")
    with pytest.raises(ValueError, match=r"want a \[M, K\] and b \[N, K\]"):
        dot(a, a.t())
    with pytest.raises(ValueError, match=r"acc must be float32 \[2, 2\]"):
        dot(a, a, torch.zeros(2, 3))
