"""Sums whose order is ours: the same float64 bits for any number of threads."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

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

    Per tensor, then over tensors in the given order, then over ranks in rank order. On a GPU per block of a tensor,
    then over the blocks of all tensors.
    """
    found = list(grads)
    if found and found[0].is_cuda:
        from samebits.into_megatron.norm_kernel import sums_of_squares

        total = ordered_sum(sums_of_squares([grad.detach() for grad in found]))
    else:
        total = 0.0
        for grad in found:
            wide = grad.detach().to(torch.float64)
            total += ordered_sum(wide * wide)
    everyone = gather_states(torch.tensor([total], dtype=torch.float64), group)
    return sum(everyone.flatten().tolist()) ** 0.5


def exact_norm(grads: Iterable[Tensor], group: dist.ProcessGroup | None) -> float:
    """Euclidean norm like `gradient_norm`, of fp32 gradients, but of the exact sum of squares, rounded at the end.

    So it does not depend on how the gradients are cut into tensors and ranks. NaN where any of them is not finite.
    """
    # Squares of 24-bit significands, in two halves of 24 bits, summed as integers for each exponent: in any order.
    grads = list(grads)
    device = grads[0].device if grads else torch.device("cpu")
    sums = torch.zeros(2, _EXPONENTS, dtype=torch.int64, device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    for grad in grads:
        for piece in grad.detach().reshape(-1).split(_PIECE):
            finite &= torch.isfinite(piece).all()
            significand, exponent = torch.frexp(piece)
            square = (significand.double() * 2.0**24).long().square()
            place = exponent.long().clamp(-_LOWEST, _EXPONENTS - 1 - _LOWEST) + _LOWEST
            sums[0].index_add_(0, place, square >> 24)
            sums[1].index_add_(0, place, square & 0xFFFFFF)
    everyone = gather_states(sums.cpu(), group).tolist()
    if not all(gather_states(finite.cpu().view(1), group).flatten().tolist()):
        return math.nan
    total = sum(
        ((high[place] << 24) + low[place]) << (2 * place) for high, low in everyone for place in range(_EXPONENTS)
    )
    return math.sqrt(Fraction(total, 1 << (2 * (_LOWEST + 24))))


# Exponents that frexp gives for finite fp32 numbers: -148 to 128.
_LOWEST, _EXPONENTS = 148, 277
_PIECE = 1 << 20


def clip_gradients(grads: Iterable[Tensor], norm: float, limit: float) -> None:
    """Scale fp32 gradients in place so that their norm is at most `limit`; 0 switches clipping off."""
    if limit <= 0.0:
        return
    scale = limit / (norm + 1e-6)
    if scale < 1.0:
        torch._foreach_mul_(list(grads), scale)
