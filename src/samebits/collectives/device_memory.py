"""GPU memory that every rank of a host can write: torch symmetric memory, or CUDA (HIP) IPC.

torch symmetric memory wants a card for each rank; IPC also serves several ranks on one card.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Exchange = Callable[[bytes], list[bytes]]

_HANDLE_BYTES = 1024


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
    said = exchange(_as_bytes(own.untyped_storage()._share_cuda_()))
    opened = [own if other == rank else _open(handle, device) for other, handle in enumerate(said)]
    return DeviceMemory("CUDA IPC", own, tuple(region.data_ptr() for region in opened), opened)


def _as_bytes(shared: Sequence[object]) -> bytes:
    fields = [{"hex": field.hex()} if isinstance(field, bytes) else field for field in shared]
    return json.dumps(fields).encode().ljust(_HANDLE_BYTES)


def _open(handle: bytes, device: torch.device) -> Tensor:
    _, *fields = (bytes.fromhex(f["hex"]) if isinstance(f, dict) else f for f in json.loads(handle))
    # The owner's number of the card may be another one here; IPC reaches any card from the one that is used.
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *fields)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
