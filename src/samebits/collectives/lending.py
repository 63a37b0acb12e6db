"""Tensors on a GPU that other processes of the host read where they lie, by CUDA (or HIP) IPC.

The owner writes a list of handles into a folder; it is plain JSON. The tensors must live, unchanged, until every
borrower is done. A borrower may compute on another card, if it sees the owner's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samebits.collectives.device_memory import ipc_handle, open_ipc

HANDLES = "handles.json"
_DTYPES = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float32)}


def lend(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write `folder`/handles.json about these contiguous CUDA tensors. ValueError for any other tensor."""
    listed = {name: _described(name, tensor) for name, tensor in tensors.items()}
    if tensors:
        # what the owner has launched must have happened before anybody reads
        torch.cuda.synchronize(next(iter(tensors.values())).device)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HANDLES).write_text(json.dumps(listed), encoding="utf-8")


def lent_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """The shape of every tensor that is lent in `folder`; None where nothing is. Opens no tensor."""
    if not (folder / HANDLES).is_file():
        return None
    listed = json.loads((folder / HANDLES).read_text(encoding="utf-8"))
    return {name: tuple(about["shape"]) for name, about in listed.items()}


def borrow(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything lent in `folder`, by name, on the owner's card. They must not be written to, nor
    kept.

    ValueError where this process does not see that card.
    """
    listed = json.loads((folder / HANDLES).read_text(encoding="utf-8"))
    seen = {_card(device): device for device in map(_device, range(torch.cuda.device_count()))}
    for name in sorted(listed):
        about = listed[name]
        where = seen.get(about["card"])
        if where is None:
            raise ValueError(
                f"{name} is lent on card {about['card']}, this process sees {', '.join(seen)}; let it see all cards of "
                "the host, or publish weights as files"
            )
        flat = open_ipc(about["storage"], _DTYPES[about["dtype"]], where)
        yield name, flat[about["start"] :][: about["count"]].view(about["shape"])


def _described(name: str, tensor: Tensor) -> dict[str, Any]:
    if not tensor.is_cuda or not tensor.is_contiguous() or str(tensor.dtype) not in _DTYPES:
        raise ValueError(
            f"{name}: want a contiguous CUDA tensor of {', '.join(_DTYPES)}, got {tensor.dtype} on {tensor.device}"
        )
    return {
        "card": _card(tensor.device),
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "start": tensor.storage_offset(),
        "count": tensor.numel(),
        "storage": ipc_handle(tensor),
    }


def _device(index: int) -> torch.device:
    return torch.device("cuda", index)


def _card(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
