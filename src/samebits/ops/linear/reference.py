"""The definition of the linear map and its gradients, by bits; `backend` is that of the dot products."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.arithmetic import dot


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: int,
    dtype: torch.dtype,
    arithmetic: str,
    backend: str = "reference",
) -> Tensor:
    """x [M, K], weight [N, K], bias [N], all bf16 -> [M, N] of `dtype` (bf16 or fp32)."""
    width = x.shape[1] // segments
    parts = [slice(at, at + width) for at in range(0, x.shape[1], width)]
    level = [dot(x[:, part], weight[:, part], None, arithmetic, backend) for part in parts]
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    total = level[0] if bias is None else level[0] + bias.float()
    return _finish(total, dtype)


def dgrad(dy: Tensor, weight: Tensor, dtype: torch.dtype, arithmetic: str, backend: str = "reference") -> Tensor:
    """dy [M, N], weight [N, K], both bf16 -> dx [M, K] of `dtype`: one chain over n ascending."""
    return _finish(dot(dy, weight.t(), None, arithmetic, backend), dtype)


def wgrad(dy: Tensor, x: Tensor, buffer: Tensor, arithmetic: str, backend: str = "reference") -> None:
    """Continues the chains of `buffer` [N, K] fp32 over the rows of dy [M, N] and x [M, K], both bf16."""
    buffer.copy_(_finish(dot(dy.t(), x.t(), buffer, arithmetic, backend), torch.float32))


def bias_grad(dy: Tensor, buffer: Tensor) -> None:
    """Continues the sums of `buffer` [N] fp32 over the rows of dy [M, N] bf16, ascending."""
    total = buffer
    for row in dy:
        total = total + row.float()
    buffer.copy_(_finish(total, torch.float32))


def _finish(total: Tensor, dtype: torch.dtype) -> Tensor:
    """One rounding; every NaN becomes the canonical one (0x7fc00000, 0x7fc0)."""
    canonical = torch.tensor(float("nan"), dtype=dtype, device=total.device)
    return torch.where(torch.isnan(total), canonical, total.to(dtype))
