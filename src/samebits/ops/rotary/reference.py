"""The definition of rotary position embedding (J. Su et al., "RoFormer", 2021), half-split pairs."""

from __future__ import annotations

import torch

from samebits.arithmetic import round_bf16


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inverse: bool
) -> torch.Tensor:
    """x [T, heads, D] bf16 rotated by the angles of `positions` [T]; `inverse` turns the other way (backward)."""
    c, s = cos[positions][:, None, :], sin[positions][:, None, :]
    if inverse:
        s = -s
    half = x.shape[-1] // 2
    x1, x2 = x[..., :half].float(), x[..., half:].float()
    return round_bf16(torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1))
