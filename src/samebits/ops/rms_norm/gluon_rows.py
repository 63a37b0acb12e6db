"""Forward of wide rows on NVIDIA: the arithmetic of norm_forward in triton.py with threads that own what they load.

A row goes through shared memory once: it is loaded and stored 16 bytes at a time, and summed by one thread per lane.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from samebits.arithmetic.triton import count_launch, round_bf16_of
from samebits.ops.rms_norm.contract import LANES

_LANES = gl.constexpr(LANES)


@gluon.jit
def _pair(a, b):
    return a + b


@gluon.jit
def _folded(lanes, COUNT: gl.constexpr):
    """The sum of the lanes: the upper half is added onto the lower half. A reduction of a pair has no order."""
    half = gl.reduce(gl.reshape(lanes, (2, COUNT // 2)), 0, _pair)
    if COUNT == 2:
        return gl.reduce(half, 0, _pair)
    else:
        return _folded(half, COUNT // 2)


@gluon.jit
def _sum_of(lanes, WARPS: gl.constexpr):
    """The sum of the lanes, as in _folded, in every warp: to fold across warps would take a barrier a step."""
    rows: gl.constexpr = _LANES // 32
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    parts = gl.allocate_shared_memory(gl.float32, [rows, 32], plain, gl.reshape(lanes, (rows, 32)))
    all_lanes = parts.load(gl.BlockedLayout([rows, 1], [1, 32], [1, WARPS], [1, 0]))
    half = gl.reduce(gl.reshape(all_lanes, (2, rows // 2, 32)), 0, _pair)
    return _folded(gl.reduce(half, 0, _pair), 32)


@gluon.jit
def norm_row(
    x, residual, weight, y, total, scale, counter, x_row, residual_row, eps,
    W: gl.constexpr, WIDTH: gl.constexpr, ADD: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One row per program; WIDTH is the power of two from W on."""
    count_launch(counter)
    wide: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    row = gl.program_id(0).to(gl.int64)
    at = gl.arange(0, WIDTH, wide)
    inside = at < W
    value = gl.load(x + row * x_row + at, mask=inside, other=0.0)
    if ADD:
        other = gl.load(residual + row * residual_row + at, mask=inside, other=0.0)
    w = gl.load(weight + at, mask=inside, other=0.0)
    if ADD:
        value = round_bf16_of(value.to(gl.float32) + other.to(gl.float32))
    shared = gl.allocate_shared_memory(gl.bfloat16, [WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [0]), value)
    acc = gl.zeros((_LANES,), gl.float32, lanes)
    for block in gl.static_range((W + _LANES - 1) // _LANES):
        part = shared.slice(block * _LANES, _LANES).load(lanes).to(gl.float32)
        acc = gl.fma(part, part, acc)
    squares = _sum_of(acc, WARPS)
    if W & (W - 1) == 0:
        mean = squares * (1.0 / W)  # exact, as the division is
    else:
        mean = gl.div_rn(squares, W * 1.0)
    factor = gl.div_rn(1.0, gl.sqrt_rn(mean + eps))
    gl.store(scale + row, gl.where(factor != factor, float("nan"), factor))
    out = round_bf16_of((value.to(gl.float32) * factor) * w.to(gl.float32))
    gl.store(y + row * W + at, out, mask=inside)
    if ADD:
        gl.store(total + row * W + at, value, mask=inside)
