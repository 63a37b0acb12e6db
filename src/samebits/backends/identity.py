"""Which kernels a process computes with: plain data for its route record."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from samebits.backends.device_counters import counters


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
        "counters": counters(device),
    }
