"""The embedding table."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from samebits.backends import lazy, pick
from samebits.ops.embedding.contract import EMBEDDING as EMBEDDING
from samebits.ops.gradients import deliver_weight_gradient, weight_gradient_buffer
from samebits.ops.rows import as_rows

BACKENDS = lazy("samebits.ops.embedding", "cpu", "reference", "triton")


def embedding(ids: torch.Tensor, weight: torch.Tensor, start: int = 0, backend: str | None = None) -> torch.Tensor:
    """Rows weight[ids - start] -> [..., H] bf16; weight [rows, H] holds the ids [start, start + rows).

    An id that another rank owns gives a row of +0 and no gradient. Raises ValueError on other dtypes.
    """
    if weight.dtype != torch.bfloat16 or weight.ndim != 2 or not weight.is_contiguous():
        raise ValueError(
            f"embedding: weight must be contiguous bfloat16 [rows, H], got {weight.dtype} {list(weight.shape)}"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"embedding: ids must be int32 or int64, got {ids.dtype}")
    impl = pick("embedding", BACKENDS, backend, weight, ids)
    flat = ids.reshape(-1).long().contiguous()
    differentiable = torch.is_grad_enabled() and weight.requires_grad
    y = _Embedding.apply(flat, weight, start, impl) if differentiable else impl.forward(flat, weight, start)
    return y.view(*ids.shape, weight.shape[1])


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ids: torch.Tensor,
        weight: torch.Tensor,
        start: int,
        impl: ModuleType,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.start, ctx.impl = start, impl
        return impl.forward(ids, weight, start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor):
        ids, weight = ctx.saved_tensors
        dw = weight_gradient_buffer(weight)
        ctx.impl.backward(ids, as_rows(dy), ctx.start, dw)
        return None, deliver_weight_gradient(weight, dw), None, None
