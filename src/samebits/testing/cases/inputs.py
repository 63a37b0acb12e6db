"""Seeded inputs: normal numbers, special values, views with poison around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from samebits.testing.cases.case import Subject

ROWS = 256  # the fewest random rows with which a comparison is no blind test


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Seeded normal numbers as bf16."""
    return (scale * torch.randn(*shape, generator=generator(seed))).bfloat16()


def randint(low: int, high: int, count: int, seed: int = 0) -> Tensor:
    """Seeded int64 [count] in [low, high)."""
    return torch.randint(low, high, (count,), generator=generator(seed))


def gain(width: int) -> Tensor:
    """A norm's weight, bf16 [width], around 1."""
    return (1 + 0.3 * randn(width, seed=2).float()).bfloat16()


def spread(rows: int, width: int, seed: int = 0) -> Tensor:
    """bf16 over all magnitudes in whole rows: tiny, usual and huge ones, so that sums under- and overflow."""
    exponents = torch.randint(-70, 64, (rows, 1), generator=generator(seed + 1))
    return (randn(rows, width, seed=seed).float() * torch.exp2(exponents.float())).bfloat16()


def special(rows: int, width: int, seed: int = 0) -> Tensor:
    """`spread`, where every fourth element of every other row is NaN, an infinity, a zero or subnormal."""
    patterns = (0x7FC1, 0xFF81, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x7F7F, 0xFF7F)
    values = torch.tensor([p - 0x10000 * (p > 0x7FFF) for p in patterns], dtype=torch.int16).view(torch.bfloat16)
    chosen = values[torch.randint(0, len(values), (rows, width), generator=generator(seed + 2))]
    mask = torch.rand(rows, width, generator=generator(seed + 3)) < 0.25 / max(1, width // 16)
    return torch.where(mask & (torch.arange(rows)[:, None] % 2 == 0), chosen, spread(rows, width, seed))


def poison(tensor: Tensor) -> Tensor:
    """A tensor like this one full of what must not be read: NaN, or the largest integer."""
    if tensor.is_floating_point():
        return torch.full_like(tensor, torch.nan)
    return torch.full_like(tensor, torch.iinfo(tensor.dtype).max)


def inside(tensor: Tensor, margins: Sequence[int] = (), before: int = 8, after: int = 24) -> Tensor:
    """A copy of `tensor` as a view into a larger one full of poison.

    Without `margins` it stays contiguous; else axis i has margins[i] elements of poison on either side.
    """
    if not margins:
        flat = tensor.new_empty(before + tensor.numel() + after)
        flat = poison(flat)
        flat[before : before + tensor.numel()] = tensor.flatten()
        return flat[before : before + tensor.numel()].view(tensor.shape)
    shape = [size + 2 * margin for size, margin in zip(tensor.shape, margins, strict=True)]
    wide = poison(tensor.new_empty(shape))
    view = wide[tuple(slice(m, m + size) for size, m in zip(tensor.shape, margins, strict=True))]
    view.copy_(tensor)
    return view


def with_gradients(
    function: Callable[..., Tensor], at: Subject, *inputs: Tensor, weights: int = 0
) -> tuple[Tensor, ...]:
    """(output, gradient of each input) for a seeded upstream gradient of the output's dtype.

    The last `weights` inputs have an fp32 main_grad that is not empty, and that is what is returned for them:
    a gradient that was rounded to bf16 would hide most faults.
    """
    leaves = [at.put(t).detach().requires_grad_() for t in inputs]
    for leaf in leaves[len(leaves) - weights :]:
        start = torch.randn(leaf.shape, generator=generator(98))
        leaf.main_grad = at.put(inside(start))  # type: ignore[attr-defined]
    y = function(*leaves)
    upstream = torch.randn(y.shape, generator=generator(99)).to(y.dtype)
    y.backward(at.put(upstream))
    gradients = (leaf.main_grad if hasattr(leaf, "main_grad") else leaf.grad for leaf in leaves)
    return (y.detach(), *(gradient for gradient in gradients if gradient is not None))


def grown_by_pieces(
    step: Callable[[Tensor, slice], Tensor], at: Subject, weight: Tensor, rows: int, pieces: Sequence[int]
) -> Tensor:
    """The main_grad of `weight` after backward through `step(weight, rows of a piece)` for one piece after another.

    The upstream gradient of a row depends on the row, not on its piece.
    """
    leaf = at.put(weight).detach().requires_grad_()
    leaf.main_grad = at.put(torch.randn(weight.shape, generator=generator(98)))  # type: ignore[attr-defined]
    begin = 0
    for size in pieces:
        y = step(leaf, slice(begin, begin + size))
        whole = torch.randn(rows, *y.shape[1:], generator=generator(99)).to(y.dtype)
        y.backward(at.put(whole[begin : begin + size]))
        begin += size
    if begin != rows:
        raise ValueError(f"the pieces hold {begin} of {rows} rows")
    grown: Tensor = leaf.main_grad  # type: ignore[attr-defined]
    return grown
