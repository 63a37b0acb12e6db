"""The order in which partial sums of ranks are added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
