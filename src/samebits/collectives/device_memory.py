"""GPU memory that every rank of a host can write: torch symmetric memory, or CUDA (HIP) IPC.

torch symmetric memory wants a card for each rank; IPC also serves several ranks on one card.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Exchange = Callable[[bytes], list[bytes]]

_HANDLE_BYTES = 1024
_NO_COUNTER = b"/samebits-no-counter"  # no file has this name, and where none is, torch's reader counts nothing


@dataclass(frozen=True)
class DeviceMemory:
    """The regions of all ranks: this rank's own as uint8 [n], zeroed, and the address of each as seen from here."""

    kind: str
    own: Tensor
    addresses: tuple[int, ...]
    kept: object  # what must live for as long as the addresses are used


def card_name(device: torch.device) -> bytes:
    """16 bytes that name a card of this host, in every process alike."""
    properties = torch.cuda.get_device_properties(device)
    return bytes.fromhex(str(properties.uuid).replace("-", ""))


def symmetric_memory(size: int, device: torch.device, group: dist.ProcessGroup) -> DeviceMemory:
    """Regions of `size` bytes by torch symmetric memory. Never through multicast addresses."""
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, group)
    own.zero_()
    return DeviceMemory("torch symmetric memory", own, tuple(handle.buffer_ptrs), handle)


def ipc_memory(size: int, device: torch.device, rank: int, exchange: Exchange) -> DeviceMemory:
    """Regions of `size` bytes by IPC handles; `exchange` carries bytes of one length from every rank to every rank."""
    own = torch.zeros(size, dtype=torch.uint8, device=device)
    said = exchange(json.dumps(ipc_handle(own)).encode().ljust(_HANDLE_BYTES))
    # The owner's number of the card may be another one here; IPC reaches any card from the one that is used.
    opened = [
        own if other == rank else open_ipc(json.loads(handle), torch.uint8, device) for other, handle in enumerate(said)
    ]
    return DeviceMemory("CUDA IPC", own, tuple(region.data_ptr() for region in opened), opened)


def ipc_handle(tensor: Tensor) -> list[Any]:
    """How other processes of the host reach the memory behind a CUDA tensor, as plain JSON.

    The memory lives as long as its owner keeps it, whoever reads.
    """
    _, memory, size, offset, counter, place, event, waits = tensor.untyped_storage()._share_cuda_()
    # torch counts on one reader. Memory that two have read it keeps for good (pytorch/pytorch#172060), so none counts.
    torch.UntypedStorage._release_ipc_counter_cuda(counter, place)
    return [memory.hex(), size, offset, event.hex(), waits]


def open_ipc(handle: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """All memory behind a handle as one row of `dtype`, on the card that this process calls `device`."""
    memory, size, offset, event, waits = handle
    storage: Any = torch.UntypedStorage._new_shared_cuda(
        device.index, bytes.fromhex(memory), size, offset, _NO_COUNTER, 0, bytes.fromhex(event), waits
    )
    return torch.empty(0, dtype=dtype, device=device).set_(storage)
