"""The definition of SwiGLU (N. Shazeer, "GLU Variants Improve Transformer", 2020) by bits."""

from __future__ import annotations

import torch

from samebits.arithmetic import round_bf16, sigmoid


def forward(gate_up: torch.Tensor) -> torch.Tensor:
    """[rows, 2F] bf16, gate then up -> [rows, F] bf16."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return round_bf16((gate * sigmoid(gate)) * up)


def backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The gradient of gate_up: with s = sigmoid(g), dg = ((dy * u) * s) * (1 + g * (1 - s)), du = dy * (g * s)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    s = sigmoid(gate)
    d = dy.float()
    dgate = ((d * up) * s) * (1.0 + gate * (1.0 - s))
    return round_bf16(torch.cat([dgate, d * (gate * s)], dim=-1))
