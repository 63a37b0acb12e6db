"""The linear map y = x W^T + b, the parts of it that tensor-parallel ranks compute, and its gradients."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from samebits.backends import lazy, pick, pick_arithmetic
from samebits.ops.gradients import deliver_weight_gradient, weight_gradient_buffer
from samebits.ops.linear.contract import LINEAR as LINEAR
from samebits.ops.linear.contract import LINEAR_GRADIENT as LINEAR_GRADIENT

BACKENDS = lazy("samebits.ops.linear", "cpu", "reference", "triton")


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    segments: int = 1,
    backend: str | None = None,
    arithmetic: str | None = None,
) -> Tensor:
    """x [..., K], weight [N, K], bias [N], all bf16 -> [..., N] bf16, rounded once.

    K is cut into `segments` equal parts, a power of two that divides K; anything else raises ValueError, as
    do other dtypes and shapes. `arithmetic` says how dot products accumulate (fma32, sm90 or cdna3); the
    device's own is the default, as it is of every function here. Gradients follow LINEAR_GRADIENT;
    `weight.main_grad` and `bias.main_grad` are continued where they exist.
    """
    return _apply(x, weight, bias, segments, torch.bfloat16, backend, arithmetic)


def linear_partial(
    x: Tensor, weight: Tensor, segments: int = 1, backend: str | None = None, arithmetic: str | None = None
) -> Tensor:
    """The fp32 sum [..., N] before rounding: what a rank that holds `segments` of the K segments contributes.

    Balanced tree sums of these over ranks, plus bias, rounded once, give `linear` with the ranks' segments
    together. An fp32 gradient is rounded to bf16 before it is used.
    """
    return _apply(x, weight, None, segments, torch.float32, backend, arithmetic)


def matmul_f32(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    backend: str | None = None,
    arithmetic: str | None = None,
) -> Tensor:
    """x [..., K], weight [N, K], bias [N], all bf16 -> fp32 [..., N], not rounded (logits of an LM head)."""
    return _apply(x, weight, bias, 1, torch.float32, backend, arithmetic)


def dgrad(
    dy: Tensor,
    weight: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
    arithmetic: str | None = None,
) -> Tensor:
    """The gradient of x: dy [..., N], weight [N, K] -> [..., K] of `dtype`, bf16 or fp32 (not rounded).

    fp32 is for column-parallel layers, where ranks add their parts by a tree before the rounding.
    """
    if weight.dim() != 2 or weight.dtype != torch.bfloat16 or dy.shape[-1] != weight.shape[0] or not weight.shape[1]:
        raise ValueError(
            f"dgrad: want dy [..., N] and weight [N, K] bfloat16 with K >= 1, "
            f"got {list(dy.shape)} and {list(weight.shape)} {weight.dtype}"
        )
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dgrad: dtype must be bfloat16 or float32, got {dtype}")
    impl, kind = pick("linear", BACKENDS, backend, dy, weight), pick_arithmetic("dgrad", arithmetic, dy)
    dx: Tensor = impl.dgrad(_gradient_rows(dy), _inner(weight), dtype, kind)
    return dx.view(*dy.shape[:-1], weight.shape[1])


def wgrad(dy: Tensor, x: Tensor, buffer: Tensor, backend: str | None = None, arithmetic: str | None = None) -> None:
    """Adds the gradient of weight to `buffer` [N, K] fp32, contiguous: its chains continue over the rows of
    dy [..., N] and x [..., K], so a batch may be cut between calls: anywhere under fma32, and at multiples of
    16 rows (sm90) or 8 (cdna3), whose groups count from the first row of a call."""
    if buffer.dtype != torch.float32 or not buffer.is_contiguous():
        raise ValueError(f"wgrad: buffer must be contiguous float32, got {buffer.dtype} {buffer.stride()}")
    if x.dtype != torch.bfloat16:
        raise ValueError(f"wgrad: x must be bfloat16, got {x.dtype}")
    rows, inputs = _gradient_rows(dy), _rows(x)
    if rows.shape[0] != inputs.shape[0] or buffer.shape != (rows.shape[1], inputs.shape[1]) or not buffer.shape[1]:
        raise ValueError(
            f"wgrad: want dy [M, N], x [M, K], buffer [N, K] with K >= 1; "
            f"got {list(dy.shape)}, {list(x.shape)}, {list(buffer.shape)}"
        )
    impl, kind = pick("linear", BACKENDS, backend, dy, x, buffer), pick_arithmetic("wgrad", arithmetic, dy)
    impl.wgrad(rows, inputs, buffer, kind)


def _apply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: int,
    dtype: torch.dtype,
    backend: str | None,
    arithmetic: str | None,
) -> Tensor:
    impl, kind = pick("linear", BACKENDS, backend, x, weight, bias), pick_arithmetic("linear", arithmetic, x)
    _check(x, weight, bias, segments)
    rows = _rows(x)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        y: Tensor = _Linear.apply(rows, weight, bias, segments, dtype, impl, kind)
    else:
        y = impl.forward(rows, _inner(weight), bias, segments, dtype, kind)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


def _rows(x: Tensor) -> Tensor:
    """[rows, width] with unit inner stride; a copy only where the layout asks for it."""
    return _inner(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))


def _inner(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _gradient_rows(dy: Tensor) -> Tensor:
    """A gradient as bf16 rows: an fp32 one is rounded here, which is part of the contract."""
    return _rows(dy if dy.dtype == torch.bfloat16 else dy.bfloat16())


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, segments: int) -> None:
    bf16 = torch.bfloat16
    if x.dtype != bf16 or weight.dtype != bf16:
        raise ValueError(f"linear: x and weight must be bfloat16, got {x.dtype} and {weight.dtype}")
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: x and weight do not match: {list(x.shape)} and {list(weight.shape)}")
    if not weight.shape[0]:
        raise ValueError(f"linear: weight must have at least one row, got {list(weight.shape)}")
    if bias is not None and (bias.dtype != bf16 or bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        raise ValueError(
            f"linear: bias must be contiguous bfloat16 [{weight.shape[0]}], got {bias.dtype} {list(bias.shape)}"
        )
    if segments != 1 and (segments < 1 or segments & (segments - 1) or x.shape[-1] % segments):
        raise ValueError(f"linear: segments must be a power of two that divides K = {x.shape[-1]}, got {segments}")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        segments: int,
        dtype: torch.dtype,
        impl: ModuleType,
        arithmetic: str,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.impl, ctx.arithmetic = impl, arithmetic
        return impl.forward(x, _inner(weight), bias, segments, dtype, arithmetic)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        x, weight, bias = ctx.saved_tensors
        dy, dx, dw, db = _gradient_rows(grad), None, None, None
        if ctx.needs_input_grad[0]:
            dx = ctx.impl.dgrad(dy, _inner(weight), torch.bfloat16, ctx.arithmetic)
        if ctx.needs_input_grad[1]:
            buffer = weight_gradient_buffer(weight)
            ctx.impl.wgrad(dy, x, buffer, ctx.arithmetic)
            dw = deliver_weight_gradient(weight, buffer)
        if bias is not None and ctx.needs_input_grad[2]:
            buffer = weight_gradient_buffer(bias)
            ctx.impl.bias_grad(dy, buffer)
            db = deliver_weight_gradient(bias, buffer)
        return dx, dw, db, None, None, None, None
