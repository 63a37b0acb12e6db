"""The order in which partial sums of ranks are added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samebits.arithmetic.rounding import round_bf16
from samebits.collectives.groups import require_power_of_two


def fold_neighbours(parts: Sequence[Tensor]) -> Tensor:
    """Sum of fp32 tensors by a balanced binary tree over neighbours: ((p0+p1)+(p2+p3))+...

    Raises ValueError unless there are a power of two of them and all are fp32.
    """
    require_power_of_two(len(parts), "fold_neighbours")
    for part in parts:
        if part.dtype != torch.float32:
            raise ValueError(f"fold_neighbours: partial sums must be float32, got {part.dtype}")
    level = list(parts)
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    return level[0]


def fold_stacked(stacked: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """`fold_neighbours` of the rows of fp32 [ranks, n] -> [n], finished as `finish` does it; on a GPU by one kernel."""
    if stacked.is_cuda:
        from samebits.collectives.triton import fold  # a machine without GPUs needs no Triton

        return fold(stacked, bias, dtype)
    return finish(fold_neighbours(stacked.unbind(0)), bias, dtype)


def finish(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A finished fp32 sum, plus `bias` bf16 [c] repeated over it, rounded once where `dtype` is bf16."""
    if bias is not None:
        total = (total.view(-1, bias.numel()) + bias.float()).view(total.shape)
    return round_bf16(total) if dtype == torch.bfloat16 else total
