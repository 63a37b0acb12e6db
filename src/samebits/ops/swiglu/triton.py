"""The Triton kernels, on tensors of a CUDA or HIP device."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.arithmetic.triton import count_launch, round_bf16_of, sigmoid_of
from samebits.backends.device_counters import slot
from samebits.backends.launcher import cdiv, launcher

BLOCK = 1024


@triton.jit
def swiglu_forward(gate_up, y, counter, gate_row, F, BLOCK: tl.constexpr):
    count_launch(counter)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = at < F
    gate = tl.load(gate_up + row * gate_row + at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_row + F + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + row * F + at, round_bf16_of((gate * sigmoid_of(gate)) * up), mask=ok)


@triton.jit
def swiglu_backward(dy, gate_up, grad, counter, dy_row, gate_row, F, BLOCK: tl.constexpr):
    count_launch(counter)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = at < F
    gate = tl.load(gate_up + row * gate_row + at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_row + F + at, mask=ok, other=0.0).to(tl.float32)
    d = tl.load(dy + row * dy_row + at, mask=ok, other=0.0).to(tl.float32)
    s = sigmoid_of(gate)
    dgate = ((d * up) * s) * (1.0 + gate * (1.0 - s))
    tl.store(grad + row * (2 * F) + at, round_bf16_of(dgate), mask=ok)
    tl.store(grad + row * (2 * F) + F + at, round_bf16_of(d * (gate * s)), mask=ok)


def forward(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, width, dtype=torch.bfloat16, device=gate_up.device)
    if y.numel():
        launcher(swiglu_forward)[(rows, cdiv(width, BLOCK))](
            gate_up, y, slot("swiglu.forward", y.device), gate_up.stride(0), width,
            BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    grad = torch.empty(rows, 2 * width, dtype=torch.bfloat16, device=gate_up.device)
    if grad.numel():
        launcher(swiglu_backward)[(rows, cdiv(width, BLOCK))](
            dy, gate_up, grad, slot("swiglu.backward", dy.device), dy.stride(0), gate_up.stride(0), width,
            BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return grad


_TYPES = dict.fromkeys(("gate_up", "y", "dy", "grad"), "*bf16") | dict.fromkeys(("gate_row", "dy_row", "F"), "i32")
_TYPES |= {"counter": "*i64"}
KERNELS = tuple(
    (
        name, kernel, {n: _TYPES[n] for n in kernel.arg_names if n in _TYPES}, {"BLOCK": BLOCK},
        {"num_warps": 4, "divisible": ("gate_row", "dy_row", "F")},
    )
    for name, kernel in (("forward", swiglu_forward), ("backward", swiglu_backward))
)  # fmt: skip
