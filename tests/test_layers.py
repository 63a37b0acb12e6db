"""Who may import whom: every import inside samebits points down, and light rooms stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import samebits

ROOT = Path(samebits.__file__).parent

# room -> the rooms that it may import (besides itself)
MAY_IMPORT: dict[str, set[str]] = {
    "contract": set(),
    "env": set(),
    "scratch": set(),
    "presets": set(),
    "bits": set(),
    "timeline": {"contract"},
    "arithmetic": {"_cpu"},
    "backends": {"_cpu"},
    "ops": {"contract", "arithmetic", "backends", "_cpu", "bits"},
    "collectives": {"contract", "arithmetic", "backends", "bits", "_cpu"},
    "linear_logp": {"contract", "bits", "arithmetic", "ops", "backends", "collectives"},
    "patching": set(),
    "evidence": {"contract", "timeline", "bits"},
    "trace": {"bits"},
    "locate": {"contract", "timeline", "bits", "ops", "evidence", "trace", "rl", "scratch"},
    "into_vllm": {
        "contract", "bits", "ops", "backends", "collectives", "patching", "timeline", "trace", "env", "_cpu",
        "scratch",
    },
    "into_megatron": {
        "contract", "arithmetic", "bits", "ops", "backends", "collectives", "linear_logp", "patching", "timeline",
        "trace", "env", "_cpu",
    },
    "into_vime": {"linear_logp", "contract", "ops"},
    "rl": {"contract", "timeline", "bits", "collectives", "evidence", "trace", "env", "presets", "scratch"},
    "matrix": {"contract", "evidence", "rl", "scratch", "testing", "timeline"},
    "ablate": {"contract", "timeline", "bits", "evidence", "rl"},
    "testing": {"contract", "bits", "ops", "arithmetic", "backends", "_cpu", "timeline", "evidence"},
    "report": {"contract", "timeline", "evidence", "ablate"},
    "bench": {"ops", "_cpu"},
    "cli": {
        "contract", "timeline", "bits", "evidence", "env", "ops", "rl", "report", "bench",
        "into_vllm", "into_megatron", "linear_logp", "ablate", "locate", "matrix", "presets", "testing",
        "backends", "patching", "_cpu",
    },
}  # fmt: skip

# room -> modules that must not be loaded by importing it
LIGHT = {
    "samebits": {"torch", "pydantic"},
    "samebits.contract": {"torch", "numpy", "pydantic"},
    "samebits.contract.pages": {"torch", "numpy", "pydantic"},
    "samebits.contract.boundaries": {"torch", "numpy", "pydantic"},
    "samebits.cli.contract": {"torch", "numpy"},
    "samebits.timeline.ledger": {"torch", "numpy"},
    "samebits.timeline.rules": {"torch", "numpy"},
    "samebits.evidence.verify": {"torch", "numpy", "safetensors", "pydantic"},
    "samebits.ablate.check": {"torch", "numpy", "safetensors", "pydantic"},
    "samebits.cli.main": {"torch", "vllm", "megatron", "transformers"},
    "samebits.report": {"torch"},
    "samebits.env": {"torch"},
}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(source: str) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "samebits":
                names = [f"samebits.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("samebits.")}
    return rooms


def violations(room: str, source: str) -> set[str]:
    return imported_rooms(source) - MAY_IMPORT[room] - {room, "__version__"}


def test_every_import_points_down() -> None:
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        if path == ROOT / "__init__.py":
            continue
        room = room_of(path)
        assert room in MAY_IMPORT, f"{path}: room {room!r} is not in the table of rooms"
        wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in violations(room, path.read_text())]
    assert wrong == []


def test_a_wrong_import_is_noticed() -> None:
    assert violations("ops", "from samebits.into_vllm import plugin") == {"into_vllm"}
    assert violations("into_vllm", "import samebits.into_megatron.trainer") == {"into_megatron"}
    assert violations("contract", "def f():\n    from samebits import bits") == {"bits"}


@pytest.mark.parametrize("module", LIGHT)
def test_light_rooms_stay_light(module: str) -> None:
    code = f"import sys, {module}; print(' '.join(m for m in {sorted(LIGHT[module])} if m in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_only_one_file_reads_the_environment() -> None:
    readers = [
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if path.name != "env.py" and any(f"os.{name}" in path.read_text() for name in ("environ", "getenv", "putenv"))
    ]
    assert readers == []


WITHOUT_CPU_KERNELS = """
import importlib, sys
sys.modules["samebits._cpu"] = None
vllm = ("into_vllm.worker", "into_vllm.gpu_attention", "into_vllm.sampling")
for name in ("collectives", "linear_logp.provider", *vllm):
    importlib.import_module(f"samebits.{name}")
"""


def test_a_machine_with_gpus_needs_no_cpu_kernels() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_CPU_KERNELS], check=True, capture_output=True)
