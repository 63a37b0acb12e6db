"""Sums whose order is ours: the same float64 bits for any number of threads."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.collectives import gather_states


def ordered_sum(values: Tensor) -> float:
    """Sum of all elements in float64: fold the upper half onto the lower until one is left.

    Only elementwise additions are asked of torch, so its threads cannot change their order. 0.0 when empty.
    """
    level = values.detach().reshape(-1).to(torch.float64)
    if level.numel() == 0:
        return 0.0
    while level.numel() > 1:
        half = (level.numel() + 1) // 2
        folded = level[:half].clone()
        folded[: level.numel() - half] += level[half:]
        level = folded
    return float(level[0])


def gradient_norm(grads: Iterable[Tensor], group: dist.ProcessGroup | None) -> float:
    """Euclidean norm of this rank's gradients together with those of its group's other ranks, in float64.

    Per tensor, then over tensors in the given order, then over ranks in rank order.
    """
    total = 0.0
    for grad in grads:
        wide = grad.detach().to(torch.float64)
        total += ordered_sum(wide * wide)
    everyone = gather_states(torch.tensor([total], dtype=torch.float64), group)
    return sum(everyone.flatten().tolist()) ** 0.5


def clip_gradients(grads: Iterable[Tensor], norm: float, limit: float) -> None:
    """Scale fp32 gradients in place so that their norm is at most `limit`; 0 switches clipping off."""
    if limit <= 0.0:
        return
    scale = limit / (norm + 1e-6)
    if scale < 1.0:
        for grad in grads:
            grad.mul_(scale)
