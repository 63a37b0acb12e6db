"""The C++ forms of the arithmetics, called by address."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits import _cpu

EXP2 = 0  # the number of 2^x among the compiled primitives
CODES = {"fma32": 0, "sm90": 1, "cdna3": 2}


def dot(a: Tensor, b: Tensor, acc: Tensor, arithmetic: str) -> Tensor:
    """a [M, K], b [N, K] bf16 with unit inner stride, acc [M, N] fp32 contiguous, which is overwritten and returned."""
    _cpu.arithmetic_dot(
        CODES[arithmetic],
        a.data_ptr(),
        a.stride(0),
        b.data_ptr(),
        b.stride(0),
        acc.data_ptr(),
        a.shape[0],
        b.shape[0],
        a.shape[1],
    )
    return acc


def exp2(x: Tensor) -> Tensor:
    """2^x of a contiguous fp32 tensor, the bits of `samebits.arithmetic.exp2`."""
    y = torch.empty_like(x)
    _cpu.primitive(EXP2, x.data_ptr(), y.data_ptr(), x.numel())
    return y
