"""SwiGLU: silu(gate) * up."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from samebits.backends import lazy, pick
from samebits.ops.rows import as_rows
from samebits.ops.swiglu.contract import SWIGLU as SWIGLU

BACKENDS = lazy("samebits.ops.swiglu", "cpu", "reference", "triton")


def swiglu(gate_up: torch.Tensor, backend: str | None = None) -> torch.Tensor:
    """gate_up [..., 2F] bf16, gate then up -> silu(gate) * up, [..., F] bf16. ValueError on other dtypes."""
    if gate_up.dtype != torch.bfloat16 or gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu: gate_up must be bfloat16 [..., 2F], got {gate_up.dtype} {list(gate_up.shape)}")
    impl = pick("swiglu", BACKENDS, backend, gate_up)
    rows = as_rows(gate_up)
    differentiable = torch.is_grad_enabled() and gate_up.requires_grad
    y = _SwiGlu.apply(rows, impl) if differentiable else impl.forward(rows)
    return y.view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, impl: ModuleType) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.impl = impl
        return impl.forward(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor):
        (gate_up,) = ctx.saved_tensors
        return ctx.impl.backward(as_rows(dy), gate_up), None
