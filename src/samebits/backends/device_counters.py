"""Counters in device memory that kernels advance themselves, so that a replayed graph leaves evidence, too.

A launch passes `slot(name, device)` to its kernel, which calls `count_launch` of `samebits.arithmetic.triton` once.
The host reads all of them with `counters(device)`.
"""

from __future__ import annotations

import torch

CAPACITY = 256
_STRIDE = 2  # 16 bytes from slot to slot: kernels are compiled for pointers of one alignment

_buffers: dict[torch.device, torch.Tensor] = {}
_slots: dict[tuple[str, torch.device], torch.Tensor] = {}
_names: dict[torch.device, list[str]] = {}


def slot(name: str, device: torch.device) -> torch.Tensor:
    """The counter `name` on `device` (with an index, such as cuda:0): int64 [1], always at the same address.

    RuntimeError when the first counter of a device is asked for while a graph is captured (its memory would
    belong to the graph), and when all are taken.
    """
    found = _slots.get((name, device))
    return _new_slot(name, device) if found is None else found


def counters(device: torch.device | None = None) -> dict[str, int]:
    """How often each kernel ran on `device` (the current CUDA device if none is given) since the process began."""
    where = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    if where not in _buffers:
        return {}
    values = _buffers[where].cpu()[::_STRIDE].tolist()
    return dict(zip(_names[where], values, strict=False))


def _new_slot(name: str, device: torch.device) -> torch.Tensor:
    if device not in _buffers:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"counter {name}: run the kernels once before a graph is captured on {device}")
        _buffers[device] = torch.zeros(CAPACITY * _STRIDE, dtype=torch.int64, device=device)
        _names[device] = []
    names = _names[device]
    if len(names) == CAPACITY:
        raise RuntimeError(f"counter {name}: all {CAPACITY} counters of {device} are taken")
    at = len(names) * _STRIDE
    names.append(name)
    _slots[name, device] = _buffers[device][at : at + 1]
    return _slots[name, device]
