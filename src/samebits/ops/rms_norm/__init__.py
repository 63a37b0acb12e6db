"""RMSNorm, and RMSNorm after a residual addition."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from samebits.backends import lazy, pick
from samebits.ops.gradients import deliver_weight_gradient, weight_gradient_buffer
from samebits.ops.rms_norm.contract import RMS_NORM as RMS_NORM
from samebits.ops.rows import as_rows

BACKENDS = lazy("samebits.ops.rms_norm", "cpu", "reference", "triton")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, backend: str | None = None) -> torch.Tensor:
    """x [..., W] bf16 normalised by its root mean square, times weight [W] bf16 -> [..., W] bf16.

    Raises ValueError on other dtypes or shapes.
    """
    _check(x, None, weight)
    impl = pick("rms_norm", BACKENDS, backend, x, weight)
    rows = as_rows(x)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        y, _ = _RmsNorm.apply(rows, None, weight, eps, impl)
    else:
        y = impl.forward(rows, None, weight, eps)[0]
    return y.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(s), s) with s = bf16(x + residual): the norm and the new residual stream, both [..., W] bf16."""
    _check(x, residual, weight)
    impl = pick("rms_norm", BACKENDS, backend, x, residual, weight)
    left, right = as_rows(x), as_rows(residual)
    if torch.is_grad_enabled() and (x.requires_grad or residual.requires_grad or weight.requires_grad):
        y, total = _RmsNorm.apply(left, right, weight, eps, impl)
    else:
        y, total, _ = impl.forward(left, right, weight, eps)
    return y.view(x.shape), total.view(x.shape)


def _check(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> None:
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise ValueError(f"rms_norm: x and weight must be bfloat16, got {x.dtype} and {weight.dtype}")
    if weight.shape != x.shape[-1:] or not weight.is_contiguous():
        raise ValueError(f"rms_norm: weight must be contiguous [{x.shape[-1]}], got {list(weight.shape)}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"rms_norm: residual must be like x {list(x.shape)} {x.dtype}, got {list(residual.shape)} {residual.dtype}"
        )


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        impl: ModuleType,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, total, scale = impl.forward(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, scale)
        ctx.impl, ctx.added = impl, residual is not None
        return y, (total if residual is not None else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, dsum: torch.Tensor | None):
        x, weight, scale = ctx.saved_tensors
        dw = weight_gradient_buffer(weight)
        dx = ctx.impl.backward(as_rows(dy), x, weight, scale, None if dsum is None else as_rows(dsum), dw)
        return dx, (dx if ctx.added else None), deliver_weight_gradient(weight, dw), None, None
