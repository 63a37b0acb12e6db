"""The Triton kernels, on tensors of a CUDA or HIP device."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.arithmetic.triton import count_launch, fold_halves_of, round_bf16_of
from samebits.backends import device_arithmetic
from samebits.backends.device_counters import slot
from samebits.backends.launcher import cdiv, launcher, next_power_of_2
from samebits.ops.later import when_due
from samebits.ops.rms_norm import gluon_chain, gluon_rows, launch
from samebits.ops.rms_norm.contract import LANES
from samebits.ops.rms_norm.launch import Launch

_LANES = tl.constexpr(LANES)
AHEAD = 64  # rows that the gradient of the weight has on their way
CHAIN = {"STAGES": 4, "SLOTS": 2}  # of 128 rows that are on their way in the Gluon form, and that are made


@triton.jit
def _block(x, start, lane, ok, W: tl.constexpr):
    """x [.., start + lane], +0 past the width."""
    if start + _LANES <= W:
        return tl.load(x + start + lane, mask=ok, other=0.0)
    else:
        return tl.load(x + start + lane, mask=ok & (start + lane < W), other=0.0)


@triton.jit
def norm_forward(
    x, residual, weight, y, total, scale, counter, rows, x_row, residual_row, eps,
    W: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows per program, kept in registers between the sum of squares and the product."""
    count_launch(counter)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, _LANES)[None, :]
    ok = row < rows
    acc = tl.zeros((ROWS, _LANES), tl.float32)
    # all loads come first: a store between them would make each wait for the one before
    kept = ()
    others = ()
    for start in tl.static_range(0, W, _LANES):
        kept = kept + (_block(x + row * x_row, start, lane, ok, W),)
        if ADD:
            others = others + (_block(residual + row * residual_row, start, lane, ok, W),)
    sums = ()
    for block in tl.static_range(0, (W + _LANES - 1) // _LANES):
        value = kept[block]
        if ADD:
            value = round_bf16_of(value.to(tl.float32) + others[block].to(tl.float32))
        sums = sums + (value,)
        wide = value.to(tl.float32)
        acc = tl.fma(wide, wide, acc)
    mean = tl.div_rn(fold_halves_of(acc, ROWS, _LANES), W * 1.0)
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(
        scale + tl.reshape(row, (ROWS,)), tl.where(factor != factor, float("nan"), factor), mask=tl.reshape(ok, (ROWS,))
    )
    for block in tl.static_range(0, (W + _LANES - 1) // _LANES):
        at = block * _LANES + lane
        w = tl.load(weight + at, mask=at < W, other=0.0).to(tl.float32)
        out = round_bf16_of((sums[block].to(tl.float32) * factor[:, None]) * w)
        tl.store(y + row * W + at, out, mask=ok & (at < W))
        if ADD:
            tl.store(total + row * W + at, sums[block], mask=ok & (at < W))


@triton.jit
def norm_backward(
    dy, x, weight, scale, dsum, dx, counter, rows, dy_row, x_row, dsum_row,
    W: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of x, ROWS whole rows per program.

    The weight is loaded as often as there are rows, so that it is laid out over threads as they are.
    """
    count_launch(counter)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, _LANES)[None, :]
    ok = row < rows
    acc = tl.zeros((ROWS, _LANES), tl.float32)
    values = ()
    upstream = ()
    extra = ()
    for start in tl.static_range(0, W, _LANES):
        value = _block(x + row * x_row, start, lane, ok, W)
        d = _block(dy + row * dy_row, start, lane, ok, W)
        w = _block(weight + row * 0, start, lane, ok, W).to(tl.float32)
        acc = tl.fma(d.to(tl.float32) * w, value.to(tl.float32), acc)
        values = values + (value,)
        upstream = upstream + (d,)
        if ADD:
            extra = extra + (_block(dsum + row * dsum_row, start, lane, ok, W),)
    factor = tl.load(scale + tl.reshape(row, (ROWS,)), mask=tl.reshape(ok, (ROWS,)), other=0.0)
    k = tl.div_rn((fold_halves_of(acc, ROWS, _LANES) * factor) * factor, W * 1.0)
    for block in tl.static_range(0, (W + _LANES - 1) // _LANES):
        at = block * _LANES + lane
        w = _block(weight + row * 0, block * _LANES, lane, ok, W).to(tl.float32)
        scaled = upstream[block].to(tl.float32) * w
        out = (scaled - values[block].to(tl.float32) * k[:, None]) * factor[:, None]
        if ADD:
            out = out + extra[block].to(tl.float32)
        tl.store(dx + row * W + at, round_bf16_of(out), mask=ok & (at < W))


@triton.jit
def norm_weight_gradient(
    dy, x, scale, dw, counter, rows, dy_row, x_row, W, COLUMNS: tl.constexpr, UNROLL: tl.constexpr
):
    """dw[i] goes on as a chain of fma over rows, ascending; a program owns COLUMNS elements."""
    count_launch(counter)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ok = at < W
    acc = tl.load(dw + at, mask=ok, other=0.0)
    dy += at
    x += at
    for start in tl.range(0, rows, UNROLL):
        upstream = ()
        values = ()
        for step in tl.static_range(UNROLL):  # all loads before the chain, which would wait for each of them
            there = ok & (start + step < rows)
            factor = tl.load(scale + step, mask=start + step < rows, other=0.0)
            upstream = upstream + (tl.load(dy + step * dy_row, mask=there, other=0.0),)
            values = values + (tl.load(x + step * x_row, mask=there, other=0.0).to(tl.float32) * factor,)
        for step in tl.static_range(UNROLL):
            longer = tl.fma(upstream[step].to(tl.float32), values[step], acc)
            acc = tl.where(start + step < rows, longer, acc)
        dy += UNROLL * dy_row
        x += UNROLL * x_row
        scale += UNROLL
    tl.store(dw + at, tl.where(acc != acc, float("nan"), acc), mask=ok)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, how: Launch | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As the definition; `how` overrides the launch: any of them gives the same bits."""
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=torch.bfloat16, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    total = x if residual is None else torch.empty_like(y)
    how = how or launch.forward(width, shared=torch.version.hip is None, add=residual is not None)
    if rows and how.shared:
        launcher(gluon_rows.norm_row)[(rows,)](
            x, residual, weight, y, total, scale, slot("rms_norm.forward.rows", x.device), x.stride(0),
            0 if residual is None else residual.stride(0), eps, W=width, WIDTH=next_power_of_2(width),
            ADD=residual is not None, WARPS=how.warps, num_warps=how.warps, enable_fp_fusion=False,
        )  # fmt: skip
    elif rows:
        launcher(norm_forward)[(cdiv(rows, how.rows),)](
            x, residual, weight, y, total, scale, slot("rms_norm.forward", x.device), rows, x.stride(0),
            0 if residual is None else residual.stride(0), eps,
            W=width, ADD=residual is not None, ROWS=how.rows, num_warps=how.warps, enable_fp_fusion=False,
        )  # fmt: skip
    return y, total, scale


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, dsum: Tensor | None, dw: Tensor, how: Launch | None = None
) -> Tensor:
    """As the definition."""
    rows, width = x.shape
    dx = torch.empty(rows, width, dtype=torch.bfloat16, device=x.device)
    how = how or launch.backward(width)
    if rows:
        launcher(norm_backward)[(cdiv(rows, how.rows),)](
            dy, x, weight, scale, dsum, dx, slot("rms_norm.backward", x.device), rows, dy.stride(0), x.stride(0),
            0 if dsum is None else dsum.stride(0),
            W=width, ADD=dsum is not None, ROWS=how.rows, num_warps=how.warps, enable_fp_fusion=False,
        )  # fmt: skip
        when_due(dw, lambda: _weight_gradient(dy, x, scale, dw))
    return dx


def _weight_gradient(dy: Tensor, x: Tensor, scale: Tensor, dw: Tensor) -> None:
    rows, width = x.shape
    inputs = (dy, x, scale, dw, slot("rms_norm.weight_gradient", x.device), rows, dy.stride(0), x.stride(0))
    # 16 bytes at a time
    aligned = width % 32 == 0 and all(t.stride(0) % 16 == 0 and t.data_ptr() % 16 == 0 for t in (dy, x))
    if aligned and device_arithmetic(x.device) == "sm90":
        launcher(gluon_chain.add_rows)[(width // 32,)](*inputs, **CHAIN, num_warps=4, enable_fp_fusion=False)
    else:
        launcher(norm_weight_gradient)[(cdiv(width, 32),)](
            *inputs, width, COLUMNS=32, UNROLL=AHEAD, num_warps=1, enable_fp_fusion=False
        )


_TYPES = dict.fromkeys(("x", "residual", "weight", "y", "total", "dy", "dsum", "dx"), "*bf16") | {
    "scale": "*fp32", "dw": "*fp32", "counter": "*i64", "eps": "fp32", "W": "i32",
    **dict.fromkeys(("rows", "x_row", "residual_row", "dy_row", "dsum_row"), "i32"),
}  # fmt: skip


def _entry(
    name: str, kernel, constants: dict[str, object], warps: int, targets: str | None = None
) -> tuple[object, ...]:
    types = {n: t for n, t in _TYPES.items() if n in kernel.arg_names and n not in constants}
    divisible = tuple(n for n in types if n.endswith("_row"))
    return name, kernel, types, constants, {"num_warps": warps, "divisible": divisible, "targets": targets}


KERNELS = (
    _entry("forward", norm_forward, {"W": 2048, "ADD": True, "ROWS": 1}, launch.forward(2048).warps),
    _entry(
        "forward-heads", norm_forward, {"W": 128, "ADD": False, "residual": None, "ROWS": 16}, launch.forward(128).warps
    ),
    _entry("backward", norm_backward, {"W": 2048, "ADD": True, "ROWS": 1}, launch.backward(2048).warps),
    _entry("weight_gradient", norm_weight_gradient, {"COLUMNS": 32, "UNROLL": AHEAD}, 1),
    _entry("weight_gradient-copied", gluon_chain.add_rows, dict(CHAIN), 4, "cuda"),
    *(
        _entry(
            f"forward-row{'-add' * add}", gluon_rows.norm_row,
            {"W": 4096, "WIDTH": 4096, "ADD": add, "WARPS": warps} | ({} if add else {"residual": None}), warps, "cuda",
        )
        for add in (False, True)
        for warps in (launch.forward(4096, shared=True, add=add).warps,)
    ),
)  # fmt: skip
