"""The Triton kernels, on tensors of a CUDA or HIP device."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.arithmetic.triton import count_launch
from samebits.backends.device_counters import slot
from samebits.backends.launcher import cdiv, launcher

BLOCK = 512


@triton.jit
def gather_rows(ids, weight, y, counter, rows, start, H, BLOCK: tl.constexpr):
    count_launch(counter)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(ids + token) - start
    owned = (local >= 0) & (local < rows)
    value = tl.load(weight + local * H + at, mask=owned & (at < H), other=0.0)
    tl.store(y + token * H + at, value, mask=at < H)


@triton.jit
def scatter_rows(ids, order, dy, dw, counter, tokens, rows, start, dy_row, H, BLOCK: tl.constexpr):
    """`ids` sorted, `order` the token of each: a program is the run of one id and adds its tokens, ascending."""
    count_launch(counter)
    first = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(ids + first)
    before = tl.load(ids + first - 1, mask=first > 0, other=-1)
    local = own - start
    if ((first > 0) & (before == own)) | (local < 0) | (local >= rows):
        return
    to = dw + local * H + at
    acc = tl.load(to, mask=at < H, other=0.0)
    next_one = first
    same = own
    while same == own:
        token = tl.load(order + next_one)
        acc = acc + tl.load(dy + token * dy_row + at, mask=at < H, other=0.0).to(tl.float32)
        next_one += 1
        same = tl.load(ids + next_one, mask=next_one < tokens, other=-1)
        same = tl.where(next_one < tokens, same, own - 1)
    tl.store(to, tl.where(acc != acc, float("nan"), acc), mask=at < H)


def forward(ids: Tensor, weight: Tensor, start: int) -> Tensor:
    y = torch.empty(ids.shape[0], weight.shape[1], dtype=weight.dtype, device=weight.device)
    if y.numel():
        launcher(gather_rows)[(ids.shape[0], cdiv(y.shape[1], BLOCK))](
            ids, weight, y, slot("embedding.forward", y.device), weight.shape[0], start, y.shape[1],
            BLOCK=BLOCK, num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def backward(ids: Tensor, dy: Tensor, start: int, dw: Tensor) -> None:
    """Sorting is stable, so the tokens of an id stay in their order."""
    if ids.numel() == 0:
        return
    ordered, order = torch.sort(ids, stable=True)
    launcher(scatter_rows)[(ids.shape[0], cdiv(dw.shape[1], BLOCK))](
        ordered, order, dy, dw, slot("embedding.backward", dw.device), ids.shape[0], dw.shape[0], start,
        dy.stride(0), dw.shape[1], BLOCK=BLOCK, num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip


_TYPES = {"weight": "*bf16", "y": "*bf16", "dy": "*bf16", "dw": "*fp32"} | dict.fromkeys(
    ("ids", "order", "counter"), "*i64"
)
_TYPES |= dict.fromkeys(("tokens", "rows", "start", "dy_row", "H"), "i32")
KERNELS = tuple(
    (
        name, kernel, {n: _TYPES[n] for n in kernel.arg_names if n in _TYPES}, {"BLOCK": BLOCK},
        {"num_warps": 2, "divisible": ("dy_row", "H")},
    )
    for name, kernel in (("forward", gather_rows), ("backward", scatter_rows))
)  # fmt: skip
