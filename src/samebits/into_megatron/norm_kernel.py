"""Sums of squares on a GPU in a fixed order: blocks of a tensor, lanes of a block, a fold over the lanes."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.arithmetic.triton import fold_halves_of
from samebits.backends.launcher import cdiv, launcher

_LANES, _STEPS = 1024, 16


@triton.jit
def block_squares(x, out, count, LANES: tl.constexpr, STEPS: tl.constexpr):
    """out[b], float64: elements of block b, LANES chains of STEPS additions each, then the lanes by halves."""
    block = tl.program_id(0)
    start = block.to(tl.int64) * LANES * STEPS + tl.arange(0, LANES)[None, :]
    total = tl.zeros((1, LANES), tl.float64)
    for step in tl.static_range(STEPS):
        at = start + step * LANES
        value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float64)
        total += value * value
    tl.store(out + block + tl.arange(0, 1), fold_halves_of(total, 1, LANES))


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """float64, one sum for each block of each tensor (contiguous fp32 on a GPU), in order."""
    each = [cdiv(tensor.numel(), _LANES * _STEPS) for tensor in tensors]
    out = torch.empty(sum(each), dtype=torch.float64, device=tensors[0].device if tensors else None)
    first = 0
    for tensor, blocks in zip(tensors, each, strict=True):
        if blocks:
            launcher(block_squares)[(blocks,)](
                tensor, out[first:], tensor.numel(), LANES=_LANES, STEPS=_STEPS, num_warps=8, enable_fp_fusion=False
            )
        first += blocks
    return out


KERNELS = (
    (
        "squares", block_squares, {"x": "*fp32", "out": "*fp64", "count": "i32"},
        {"LANES": _LANES, "STEPS": _STEPS}, {"num_warps": 8},
    ),
)  # fmt: skip
