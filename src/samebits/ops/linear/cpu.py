"""The C++ kernels, called by address.

`fma32` has kernels of its own; sm90 and cdna3 are computed dot by dot, to predict what a GPU gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits import _cpu
from samebits.ops.linear import reference


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: int, dtype: torch.dtype, arithmetic: str
) -> Tensor:
    if arithmetic != "fma32":
        return reference.forward(x, weight, bias, segments, dtype, arithmetic, backend="cpu")
    rows, width = x.shape
    columns = weight.shape[0]
    y = x.new_empty(rows, columns, dtype=dtype)
    _cpu.linear_forward(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        weight.stride(0),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        dtype is torch.float32,
        rows,
        columns,
        width,
        segments,
    )
    return y


def dgrad(dy: Tensor, weight: Tensor, dtype: torch.dtype, arithmetic: str) -> Tensor:
    if arithmetic != "fma32":
        return reference.dgrad(dy, weight, dtype, arithmetic, backend="cpu")
    rows, columns = dy.shape
    width = weight.shape[1]
    dx = dy.new_empty(rows, width, dtype=dtype)
    _cpu.linear_dgrad(
        dy.data_ptr(),
        dy.stride(0),
        weight.data_ptr(),
        weight.stride(0),
        dx.data_ptr(),
        dtype is torch.float32,
        rows,
        columns,
        width,
    )
    return dx


def wgrad(dy: Tensor, x: Tensor, buffer: Tensor, arithmetic: str) -> None:
    if arithmetic != "fma32":
        reference.wgrad(dy, x, buffer, arithmetic, backend="cpu")
        return
    _cpu.linear_wgrad(
        dy.data_ptr(), dy.stride(0), x.data_ptr(), x.stride(0), buffer.data_ptr(), dy.shape[0], *buffer.shape
    )


def bias_grad(dy: Tensor, buffer: Tensor) -> None:
    _cpu.linear_bias_grad(dy.data_ptr(), dy.stride(0), buffer.data_ptr(), *dy.shape)
