"""Guard regions around everything that a backend allocates, and NaN in what it has not written yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GUARD = 4096  # bytes before and after; keeps the alignment of the allocator
_FILL = 0xFF  # bytes of a NaN in every float type, and of -1 in every integer type
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class OutOfBounds(AssertionError):
    """Something was written before or after a tensor."""


class _Guarded(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks: list[tuple[Tensor, int, tuple[int, ...], torch.dtype]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _EMPTY or result.numel() == 0:
            return result
        size = result.untyped_storage().nbytes()
        block = torch.full((size + 2 * GUARD,), _FILL, dtype=torch.uint8, device=result.device)
        self.blocks.append((block, size, tuple(result.shape), result.dtype))
        inside = block[GUARD : GUARD + size].view(result.dtype)
        return inside.as_strided(result.shape, result.stride(), inside.storage_offset())

    def check(self) -> None:
        for block, size, shape, dtype in self.blocks:
            for where, part in (("before", block[:GUARD]), ("after", block[GUARD + size :])):
                if bool((part != _FILL).any()):
                    raise OutOfBounds(f"something was written {where} a tensor {list(shape)} of {dtype}")


@contextmanager
def guarded() -> Iterator[None]:
    """Every torch.empty inside lies between guard regions and starts as NaN (integers as -1).

    Raises OutOfBounds at the end when a guard region has changed.
    """
    mode = _Guarded()
    with mode:
        yield
    mode.check()
