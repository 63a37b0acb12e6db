"""The C++ kernels, called by address."""

from __future__ import annotations

import torch

from samebits import _cpu


def forward(gate_up: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, width)
    _cpu.swiglu_forward(gate_up.data_ptr(), gate_up.stride(0), y.data_ptr(), rows, width)
    return y


def backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    grad = gate_up.new_empty(rows, 2 * width)
    _cpu.swiglu_backward(
        dy.data_ptr(), dy.stride(0), gate_up.data_ptr(), gate_up.stride(0), grad.data_ptr(), rows, width
    )
    return grad
