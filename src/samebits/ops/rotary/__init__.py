"""Rotary position embedding."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from samebits.backends import lazy, pick
from samebits.ops.rotary.contract import ROTARY as ROTARY
from samebits.ops.rotary.table import rotary_table as rotary_table
from samebits.ops.rotary.table import table_base as table_base

BACKENDS = lazy("samebits.ops.rotary", "cpu", "reference", "triton")


def rotary(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backend: str | None = None
) -> torch.Tensor:
    """x [T, heads, D] bf16 rotated to absolute `positions` [T] (int32 or int64) -> [T, heads, D] bf16.

    `cos` and `sin` are fp32 [P, D/2] from `rotary_table`. Raises ValueError on other shapes or dtypes, and
    IndexError (compiled backend) for a position outside the table.
    """
    if x.dtype != torch.bfloat16 or x.ndim != 3 or positions.shape != x.shape[:1]:
        raise ValueError(
            f"rotary: x must be bfloat16 [T, heads, D] with positions [T], got {x.dtype} {list(x.shape)} "
            f"and {list(positions.shape)}"
        )
    if positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"rotary: positions must be int32 or int64, got {positions.dtype}")
    if x.shape[2] % 2:
        raise ValueError(f"rotary: D must be even, got {list(x.shape)}")
    for name, table in (("cos", cos), ("sin", sin)):
        shape = (cos.shape[0], x.shape[2] // 2)
        if table.dtype != torch.float32 or table.shape != shape or not table.is_contiguous():
            raise ValueError(
                f"rotary: {name} must be contiguous float32 {list(shape)}, got {table.dtype} {list(table.shape)}"
            )
    impl = pick("rotary", BACKENDS, backend, x, positions, cos, sin)
    where = positions.contiguous()
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotary.apply(x, where, cos, sin, impl)
    return impl.rotate(x, where, cos, sin, inverse=False)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        impl: ModuleType,
    ) -> torch.Tensor:
        ctx.save_for_backward(positions, cos, sin)
        ctx.impl = impl
        return impl.rotate(x, positions, cos, sin, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor):
        positions, cos, sin = ctx.saved_tensors
        return ctx.impl.rotate(dy, positions, cos, sin, inverse=True), None, None, None, None
