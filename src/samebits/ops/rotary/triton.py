"""The Triton kernel, on tensors of a CUDA or HIP device."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.arithmetic.triton import count_launch, round_bf16_of
from samebits.backends.device_counters import slot
from samebits.backends.launcher import cdiv, launcher, next_power_of_2


@triton.jit
def rotate_rows(
    x, positions, cos, sin, y, counter, tokens, x_token, x_head,
    HEADS: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens per program, ROWS (token, head) rows at a time: HEADS fills up to a power of two."""
    count_launch(counter)
    r = tl.arange(0, TOKENS * ROWS)
    token = tl.program_id(0).to(tl.int64) * TOKENS + r // ROWS
    head = r % ROWS
    d = tl.arange(0, WIDTH)[None, :]
    ok = ((token < tokens) & (head < HEADS))[:, None] & (d < HALF)
    position = tl.load(positions + token, mask=token < tokens, other=0).to(tl.int64)[:, None]
    c = tl.load(cos + position * HALF + d, mask=ok, other=0.0)
    s = tl.load(sin + position * HALF + d, mask=ok, other=0.0)
    if INVERSE:
        s = -s
    source = (token * x_token + head * x_head)[:, None] + d
    x1 = tl.load(x + source, mask=ok, other=0.0).to(tl.float32)
    x2 = tl.load(x + source + HALF, mask=ok, other=0.0).to(tl.float32)
    to = ((token * HEADS + head) * (2 * HALF))[:, None] + d
    tl.store(y + to, round_bf16_of(x1 * c - x2 * s), mask=ok)
    tl.store(y + to + HALF, round_bf16_of(x2 * c + x1 * s), mask=ok)


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool) -> Tensor:
    tokens, heads, width = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    y = torch.empty(tokens, heads, width, dtype=torch.bfloat16, device=x.device)
    rows = next_power_of_2(heads)
    together = max(1, 16 // rows)
    if y.numel():
        launcher(rotate_rows)[(cdiv(tokens, together),)](
            x, positions, cos, sin, y, slot("rotary", x.device), tokens, *x.stride()[:2], HEADS=heads,
            HALF=width // 2, INVERSE=inverse, TOKENS=together, ROWS=rows,
            WIDTH=next_power_of_2(width // 2), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y


_TYPES = {"x": "*bf16", "y": "*bf16", "cos": "*fp32", "sin": "*fp32", "positions": "*i64", "counter": "*i64"}
_TYPES |= dict.fromkeys(("tokens", "x_token", "x_head"), "i32")
KERNELS = tuple(
    (
        name, rotate_rows, _TYPES,
        {"HEADS": heads, "HALF": 64, "INVERSE": inverse, "TOKENS": max(1, 16 // heads), "ROWS": heads, "WIDTH": 64},
        {"num_warps": 4, "divisible": ("x_token", "x_head")},
    )
    for name, heads, inverse in (("queries", 32, False), ("keys", 8, False), ("backward", 32, True))
)  # fmt: skip
