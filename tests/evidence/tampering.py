"""Changing what lies in a run directory, with or without signing it anew."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from samebits.evidence.store import RunDirectory

STEP = "steps/step_00002.safetensors"


def reseal(run: Path) -> None:
    """Signs the directory anew, as someone would who tampers and knows the format."""
    manifest = json.loads((run / "manifest.json").read_bytes())
    (run / "seal.json").unlink()
    RunDirectory(run).seal({key: value for key, value in manifest.items() if key != "files"})


def sign_step(run: Path) -> None:
    """Enters the last step's sidecar into the timeline as it is now."""
    digest = hashlib.sha256((run / STEP).read_bytes()).hexdigest()
    edit_lines(run, lambda lines: find(lines, "compared").update(sidecar_sha256=digest))


def edit_route(run: Path, role: str, change: Callable[[dict], object]) -> None:
    edit_json(next((run / "routes").glob(f"*{role}*")), change)


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    record = json.loads(path.read_bytes())
    change(record)
    path.write_text(json.dumps(record))


def edit_config(run: Path, **settings: object) -> None:
    edit_json(run / "manifest.json", lambda m: m["config"].update(settings))


def edit_lines(run: Path, change: Callable[[list[dict]], object]) -> None:
    path = run / "timeline.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def flip(path: Path, byte: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def tensor_at(path: Path, name: str) -> int:
    """The offset in the file of a tensor's first byte."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return 8 + length + json.loads(content[8 : 8 + length])[name]["data_offsets"][0]


def find(lines: list[dict], kind: str, at: int = -1) -> dict:
    return [line for line in lines if line["kind"] == kind][at]
