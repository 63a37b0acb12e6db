"""Inputs for dot products that look for trouble: cancellation, wide exponents, subnormals, infinities, zeros.

Every distribution is a function (rows, columns, depth, generator) -> (a [M, K], b [N, K], acc [M, N] or None),
bf16, bf16 and fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

Inputs = tuple[Tensor, Tensor, Tensor | None]


def draw(name: str, rows: int, columns: int, depth: int, seed: int = 0) -> Inputs:
    """The named distribution, from its own seed."""
    return DISTRIBUTIONS[name](rows, columns, depth, torch.Generator().manual_seed(seed))


def _normal(shape: tuple[int, ...], g: Generator) -> Tensor:
    return torch.randn(*shape, generator=g)


def _wide(shape: tuple[int, ...], low: int, high: int, g: Generator) -> Tensor:
    """Random signs and significands, exponents uniform in [low, high], also where fp32 is subnormal."""
    significand = 1 + torch.rand(*shape, generator=g).double()
    sign = torch.randint(0, 2, shape, generator=g) * 2 - 1
    exponent = torch.randint(low, high + 1, shape, generator=g).double()
    return (sign * significand * torch.pow(2.0, exponent)).float()


def _choice(values: list[float], shape: tuple[int, ...], g: Generator) -> Tensor:
    return torch.tensor(values)[torch.randint(0, len(values), shape, generator=g)]


def _mixed(share: float, left: Tensor, right: Tensor, g: Generator) -> Tensor:
    """`left` for about `share` of the elements, `right` for the others."""
    return torch.where(torch.rand(left.shape, generator=g) < share, left, right)


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16()


def normal(m: int, n: int, k: int, g: Generator) -> Inputs:
    return _bf16(_normal((m, k), g)), _bf16(_normal((n, k), g)), None


def cancellation(m: int, n: int, k: int, g: Generator) -> Inputs:
    """The second half of every row undoes the first but for one or two last bits."""
    half = (k + 1) // 2
    a, b = _wide((m, half), -8, 8, g), _wide((n, half), -8, 8, g)
    nudge = _choice([1.0, 1.0, 1.0, 1 + 2.0**-7], (m, half), g)
    left, right = torch.cat([a, -a * nudge], 1)[:, :k], torch.cat([b, b], 1)[:, :k]
    order = torch.randperm(k, generator=g)
    return _bf16(left[:, order]), _bf16(right[:, order]), None


def wide_exponents(m: int, n: int, k: int, g: Generator) -> Inputs:
    return _bf16(_wide((m, k), -40, 40, g)), _bf16(_wide((n, k), -40, 40, g)), _wide((m, n), -80, 80, g)


def whole_range(m: int, n: int, k: int, g: Generator) -> Inputs:
    return _bf16(_wide((m, k), -130, 126, g)), _bf16(_wide((n, k), -130, 126, g)), _wide((m, n), -148, 126, g)


def overflow(m: int, n: int, k: int, g: Generator) -> Inputs:
    return _bf16(_wide((m, k), 60, 64, g)), _bf16(_wide((n, k), 58, 62, g)), _wide((m, n), 120, 127, g)


def underflow(m: int, n: int, k: int, g: Generator) -> Inputs:
    return _bf16(_wide((m, k), -80, -64, g)), _bf16(_wide((n, k), -80, -64, g)), _wide((m, n), -148, -120, g)


def underflow_from_zero(m: int, n: int, k: int, g: Generator) -> Inputs:
    """Sums of products far below the smallest fp32 number."""
    return _bf16(_wide((m, k), -78, -74, g)), _bf16(_wide((n, k), -78, -74, g)), None


def underflow_beside_zeros(m: int, n: int, k: int, g: Generator) -> Inputs:
    """The same with zero products among them and accumulators that are zeros of both signs."""
    a = _mixed(0.6, _wide((m, k), -78, -74, g), _choice([0.0, -0.0], (m, k), g), g)
    return _bf16(a), _bf16(_wide((n, k), -78, -74, g)), _choice([0.0, -0.0], (m, n), g)


def subnormal_start(m: int, n: int, k: int, g: Generator) -> Inputs:
    """Subnormal accumulators and products of their size and below."""
    return _bf16(_wide((m, k), -80, -72, g)), _bf16(_wide((n, k), -82, -70, g)), _wide((m, n), -149, -127, g)


def subnormal_factors(m: int, n: int, k: int, g: Generator) -> Inputs:
    a = _mixed(0.7, _wide((m, k), -133, -127, g), _wide((m, k), -126, -100, g), g)
    return _bf16(a), _bf16(_wide((n, k), -10, 120, g)), _wide((m, n), -140, 0, g)


def subnormal_alone(m: int, n: int, k: int, g: Generator) -> Inputs:
    """Every left factor is subnormal, so leading zeros of the significands decide what is cut off."""
    return _bf16(_wide((m, k), -133, -127, g)), _bf16(_wide((n, k), 100, 120, g)), None


def zero_with_huge_partner(m: int, n: int, k: int, g: Generator) -> Inputs:
    """Products that are zero although one factor is huge, beside products of ordinary size."""
    zero = torch.arange(k) % 3 == 0
    a = torch.where(zero, _choice([0.0, -0.0], (m, k), g), _normal((m, k), g))
    b = torch.where(zero, _wide((n, k), 30, 126, g), _normal((n, k), g))
    return _bf16(a), _bf16(b), _normal((m, n), g)


def signed_zeros(m: int, n: int, k: int, g: Generator) -> Inputs:
    """Zeros of both signs and products that vanish, into accumulators that are zeros of both signs."""
    tiny = [0.0, -0.0, 0.0, -0.0, 2.0**-100, -(2.0**-100)]
    keep = torch.rand(m, 1, generator=g) < 0.5
    a = torch.where(keep, _choice(tiny, (m, k), g), _choice([0.0, -0.0], (m, k), g))
    return _bf16(a), _bf16(_choice(tiny, (n, k), g)), _choice([0.0, -0.0, 2.0**-149, -(2.0**-149)], (m, n), g)


def negative_zeros(m: int, n: int, k: int, g: Generator) -> Inputs:
    """Every product and every accumulator is -0."""
    return _bf16(torch.full((m, k), -0.0)), _bf16(1 + torch.rand(n, k, generator=g)), torch.full((m, n), -0.0)


def infinities(m: int, n: int, k: int, g: Generator) -> Inputs:
    inf = float("inf")
    a = _mixed(0.02, _choice([inf, -inf], (m, k), g), _normal((m, k), g), g)
    b = _mixed(0.02, _choice([inf, -inf, 0.0], (n, k), g), _normal((n, k), g), g)
    return _bf16(a), _bf16(b), _mixed(0.2, _choice([inf, -inf], (m, n), g), _normal((m, n), g), g)


def nans(m: int, n: int, k: int, g: Generator) -> Inputs:
    nan = float("nan")
    a = _mixed(0.01, _choice([nan, -nan], (m, k), g), _normal((m, k), g), g)
    return _bf16(a), _bf16(_normal((n, k), g)), _mixed(0.1, _choice([nan], (m, n), g), _normal((m, n), g), g)


def large_start(m: int, n: int, k: int, g: Generator) -> Inputs:
    """Accumulators that products only just touch."""
    return _bf16(_normal((m, k), g)), _bf16(_normal((n, k), g)), _wide((m, n), 0, 30, g)


def extreme_start(m: int, n: int, k: int, g: Generator) -> Inputs:
    """The largest and smallest accumulators, and products of their size."""
    big, small = 3.4028234663852886e38, 2.0**-149
    start = _choice([big, -big, 2.0**127, small, -small, 2.0**-126, -0.0], (m, n), g)
    return _bf16(_wide((m, k), 40, 52, g)), _bf16(_wide((n, k), 48, 52, g)), start


def one_significand(m: int, n: int, k: int, g: Generator) -> Inputs:
    """All products as large as their exponent allows: the widest integer sums."""
    signs = torch.where(torch.rand(m, 1, generator=g) < 0.5, 1.0, -1.0)
    a = 1.9921875 * signs * torch.ones(m, k)
    return _bf16(a), _bf16(torch.full((n, k), 1.9921875)), signs * (2 - 2.0**-23) * torch.ones(m, n)


DISTRIBUTIONS: dict[str, Callable[[int, int, int, Generator], Inputs]] = {
    f.__name__: f
    for f in (
        normal, cancellation, wide_exponents, whole_range, overflow, underflow, underflow_from_zero,
        underflow_beside_zeros, subnormal_start, subnormal_factors, subnormal_alone, zero_with_huge_partner,
        signed_zeros, negative_zeros, infinities, nans, large_start, extreme_start, one_significand,
    )
}  # fmt: skip
