"""Are two tensors the same bits, and if not, where do they first differ?"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import torch

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers of the same size (a view where possible)."""
    return tensor.detach().contiguous().view(_INTEGER[tensor.element_size()])


@dataclass(frozen=True)
class Difference:
    """The first element that differs, and how many do."""

    index: tuple[int, ...]
    left: str
    right: str
    count: int
    total: int

    def __str__(self) -> str:
        return f"{self.count} of {self.total} elements differ; first at {self.index}: {self.left} against {self.right}"


def _show(tensor: torch.Tensor, flat: int) -> str:
    value = tensor.detach().flatten()[flat]
    size = tensor.element_size()
    pattern = int(raw(value.reshape(1))[0]) & (2 ** (8 * size) - 1)
    return f"{value.item():.9g} (0x{pattern:0{2 * size}x})"


def first_difference(left: torch.Tensor, right: torch.Tensor) -> Difference | None:
    """None when dtype-equal tensors agree in every bit, else the first Difference in row-major order.

    Raises ValueError when dtypes or shapes differ: such tensors can't be compared by bits.
    """
    if left.dtype != right.dtype or left.shape != right.shape:
        raise ValueError(f"can't compare bits of {left.dtype}{list(left.shape)} and {right.dtype}{list(right.shape)}")
    unequal = (raw(left) != raw(right)).flatten()
    count = int(unequal.sum())
    if count == 0:
        return None
    flat = int(unequal.nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), left.shape))
    return Difference(index, _show(left, flat), _show(right, flat), count, unequal.numel())


def assert_same(left: torch.Tensor, right: torch.Tensor, what: str = "tensors") -> None:
    """Raise AssertionError naming the first element whose bits differ."""
    difference = first_difference(left, right)
    if difference is not None:
        raise AssertionError(f"{what}: {difference}")


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) over dtype, shape and bytes: the content name of a tensor."""
    name = sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
    name.update(raw(tensor).cpu().view(-1).numpy().data)
    return name.hexdigest()
