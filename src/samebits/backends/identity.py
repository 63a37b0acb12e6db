"""Which kernels a process computes with: plain data for its route record."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from samebits.backends.device_counters import counters


def kernels(device: torch.device) -> dict[str, Any]:
    """The name of the kernels of this process for `device`, and the counters that they advanced."""
    return gpu_kernels(device) if device.type == "cuda" else cpu_kernels()


def cpu_kernels() -> dict[str, Any]:
    """The sha256 of the compiled library, its instruction set, and the counters that its kernels advanced.

    Raises RuntimeError in a process that flushes subnormal numbers.
    """
    from samebits import _cpu

    _require_subnormals()
    return {
        "kernels": hashlib.sha256(Path(_cpu.__file__).read_bytes()).hexdigest(),
        "instruction_set": _cpu.instruction_set(),
        "counters": dict(_cpu.counters()),
    }


def _require_subnormals() -> None:
    """The kernels see to their own mode; what torch adds up around them, over ranks and steps, has the process'."""
    if not (torch.tensor([2.0**-127]) * 0.5).view(torch.int32):
        raise RuntimeError(
            "this process flushes subnormal numbers to zero, so torch's sums have other bits than the contract's: "
            "leave torch.set_flush_denormal at False, and load no library that was linked with -ffast-math"
        )


def gpu_kernels(device: torch.device) -> dict[str, Any]:
    """Sources and compiler of the Triton kernels by their sha256, the card, and the counters that kernels advanced."""
    import triton

    import samebits

    name = hashlib.sha256(f"triton {triton.__version__}".encode())
    root = Path(samebits.__file__).parent
    for room in ("arithmetic", "collectives", "ops"):
        for source in sorted((root / room).rglob("*.py")):
            name.update(source.read_bytes())
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "kernels": name.hexdigest(),
        "instruction_set": f"sm_{major}{minor}",
        "card": torch.cuda.get_device_name(device),
        # which of the host's cards, whatever a process calls it; older releases of torch don't say
        "bus": getattr(torch.cuda.get_device_properties(device), "pci_bus_id", None),
        "counters": counters(device),
    }
