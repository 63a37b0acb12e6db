"""Kernels that break one rule of the audit each."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def approximate(x, y):
    at = tl.arange(0, 128)
    tl.store(y + at, tl.exp2(tl.load(x + at)))


@triton.jit
def half_precision(x, y):
    at = tl.arange(0, 64)
    tile = at[:, None] * 64 + at[None, :]
    a = tl.load(x + tile).to(tl.float16)
    tl.store(y + tile, tl.dot(a, a))


@triton.jit
def atomic_sum(x, y):
    at = tl.arange(0, 128)
    tl.atomic_add(y + at % 4, tl.load(x + at))


@triton.jit
def contracted(x, y):
    at = tl.arange(0, 128)
    value = tl.load(x + at)
    tl.store(y + at, value * value + 3.0)


@triton.jit
def clean(x, y):
    at = tl.arange(0, 128)
    value = tl.load(x + at)
    tl.store(y + at, tl.div_rn(value * value + 3.0, tl.sqrt_rn(value)))
