"""Rounding to a smaller type, with one bit pattern for NaN."""

from __future__ import annotations

import torch


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """fp32 -> bf16, to nearest even; every NaN becomes 0x7fc0.

    torch's own conversion writes other NaN patterns in its vectorised loop than in its tail.
    """
    bits = x.view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return torch.where(torch.isnan(x), 0x7FC0, rounded).to(torch.int16).view(torch.bfloat16)


def canonical_nan(x: torch.Tensor) -> torch.Tensor:
    """fp32 with every NaN as 0x7fc00000."""
    nan = torch.tensor(0x7FC00000, dtype=torch.int32, device=x.device).view(torch.float32)
    return torch.where(torch.isnan(x), nan, x)
