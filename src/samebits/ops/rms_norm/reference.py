"""The definition of RMSNorm (B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019) by bits."""

from __future__ import annotations

import torch

from samebits.arithmetic import canonical_nan, fma, lane_dot, round_bf16, sqrt
from samebits.ops.rms_norm.contract import LANES


def forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual [rows, W] bf16, weight [W] -> (y, x + residual, scale): bf16, bf16, fp32 [rows]."""
    if residual is not None:
        x = round_bf16(x.float() + residual.float())
    value = x.float()
    mean = lane_dot(value, value, LANES) / _on(x, x.shape[-1])
    scale = 1.0 / sqrt(mean + _on(x, eps))
    y = (value * scale[:, None]) * weight.float()
    return round_bf16(y), x, scale


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    dsum: torch.Tensor | None,
    dw: torch.Tensor,
) -> torch.Tensor:
    """The gradient of x [rows, W] bf16; dw [W] fp32 is advanced in place, row by row.

    With g = dy * weight and c = sum(g * x): dx = (g - x * (c * scale^2 / W)) * scale, plus dsum, the
    gradient that reaches x + residual from elsewhere.
    """
    value = x.float()
    scaled = dy.float() * weight.float()
    dot = lane_dot(scaled, value, LANES)
    k = ((dot * scale) * scale) / _on(x, x.shape[-1])
    dx = (scaled - value * k[:, None]) * scale[:, None]
    if dsum is not None:
        dx = dx + dsum.float()
    normed = value * scale[:, None]
    for row in range(x.shape[0]):
        dw.copy_(fma(dy[row].float(), normed[row], dw))
    dw.copy_(canonical_nan(dw))
    return round_bf16(dx)


def _on(x: torch.Tensor, value: float) -> torch.Tensor:
    """fp32 on the device of x: by a plain number torch divides through the reciprocal there."""
    return torch.tensor(value, dtype=torch.float32, device=x.device)
