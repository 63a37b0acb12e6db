"""The C++ kernels, called by address."""

from __future__ import annotations

import torch

from samebits import _cpu


def forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    y = x.new_empty(rows, width)
    scale = x.new_empty(rows, dtype=torch.float32)
    total = x if residual is None else x.new_empty(rows, width)
    _cpu.rms_norm_forward(
        x.data_ptr(),
        x.stride(0),
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        weight.data_ptr(),
        eps,
        y.data_ptr(),
        total.data_ptr(),
        scale.data_ptr(),
        rows,
        width,
    )
    return y, total, scale


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    dsum: torch.Tensor | None,
    dw: torch.Tensor,
) -> torch.Tensor:
    rows, width = x.shape
    dx = x.new_empty(rows, width)
    _cpu.rms_norm_backward(
        dy.data_ptr(),
        dy.stride(0),
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        scale.data_ptr(),
        0 if dsum is None else dsum.data_ptr(),
        0 if dsum is None else dsum.stride(0),
        dx.data_ptr(),
        dw.data_ptr(),
        rows,
        width,
    )
    return dx
