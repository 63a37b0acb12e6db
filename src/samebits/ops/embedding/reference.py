"""The definition of the embedding: a copy of rows."""

from __future__ import annotations

import torch

from samebits.arithmetic import canonical_nan


def forward(ids: torch.Tensor, weight: torch.Tensor, start: int) -> torch.Tensor:
    """ids [T] int64, weight [rows, H] -> [T, H]; an id outside [start, start + rows) gives a row of +0."""
    local = ids - start
    owned = (local >= 0) & (local < weight.shape[0])
    rows = weight[torch.where(owned, local, 0)]
    return torch.where(owned[:, None], rows, torch.zeros((), dtype=weight.dtype, device=weight.device))


def backward(ids: torch.Tensor, dy: torch.Tensor, start: int, dw: torch.Tensor) -> None:
    """dw [rows, H] fp32 advanced in place: dw[id] = dw[id] + dy[t], t ascending."""
    for t, local in enumerate((ids - start).tolist()):
        if 0 <= local < dw.shape[0]:
            dw[local] = canonical_nan(dw[local] + dy[t].float())
