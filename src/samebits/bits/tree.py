"""The content names of weights: a hash of the hashes of leaves, so that a GPU computes it where the weights lie.

The name of a tensor is SHA-256 (hex) over its dtype, its shape and the SHA-256 of every LEAF bytes, the last ones as
many as there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeVar

import torch
from torch import Tensor

from samebits.bits.same import raw

LEAF = 16384  # bytes
_THREADS = 8
Name = TypeVar("Name")


def tree_digest(tensor: Tensor) -> str:
    """The content name of one tensor."""
    return tree_digests({"": tensor})[""]


def tree_digests(tensors: Mapping[Name, Tensor]) -> dict[Name, str]:
    """The content name of every tensor. Those of a CPU several at a time, since hashing lets other threads run.

    Those of a GPU in this thread: another one would not wait for what this one's stream has yet to do.
    """
    begun = {name: _on_gpu(tensor) for name, tensor in tensors.items() if tensor.is_cuda}
    on_host = {name: tensor for name, tensor in tensors.items() if name not in begun}
    with ThreadPoolExecutor(_THREADS) as pool:
        found = dict(zip(on_host, pool.map(_on_host, on_host.values()), strict=True))
    return {name: begun[name].name() if name in begun else found[name] for name in tensors}


def part_digests(tensors: Mapping[str, Tensor], parts: Iterable[tuple[str, int, int, int]]) -> list[str]:
    """The content name of each part (name, dim, first row, row behind the last) of the tensors."""
    found = {part: tensors[part[0]].narrow(part[1], part[2], part[3] - part[2]) for part in parts}
    return list(tree_digests(found).values())


def _named(like: Tensor, leaves: Iterable[bytes | memoryview]) -> str:
    name = sha256(f"{like.dtype}{list(like.shape)}".encode())
    for leaf in leaves:
        name.update(leaf)
    return name.hexdigest()


def _on_host(tensor: Tensor) -> str:
    held = _bytes(tensor).numpy().data
    return _named(tensor, (sha256(held[at : at + LEAF]).digest() for at in range(0, len(held), LEAF)))


@dataclass(frozen=True)
class _OnGpu:
    """Hashes of whole leaves and the bytes behind them, on their way."""

    tensor: Tensor
    leaves: Tensor
    rest: Tensor

    def name(self) -> str:
        rest = self.rest.cpu().numpy().tobytes()
        return _named(self.tensor, [self.leaves.cpu().numpy().data, sha256(rest).digest() if rest else b""])


def _on_gpu(tensor: Tensor) -> _OnGpu:
    from samebits.bits.sha256_triton import whole_leaves

    held = _bytes(tensor)
    held = held.clone() if held.data_ptr() % 4 else held
    whole = held.numel() // LEAF * LEAF
    # a copy, so that nothing keeps what may itself be one
    return _OnGpu(tensor, whole_leaves(held[:whole]), held[whole:].clone())


def _bytes(tensor: Tensor) -> Tensor:
    return raw(tensor).reshape(-1).view(torch.uint8)
