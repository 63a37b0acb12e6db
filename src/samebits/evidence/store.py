"""The run directory: what lies where, how files get in, and the seal that closes it. Standard library only.

manifest.json   schema, config, contract, packages, platform, source, inputs; when sealed, what these were at the end,
                and every file with its sha256
timeline.jsonl  one event a line, append-only
steps/          one safetensors sidecar per step
routes/         one JSON record per process: which code served which module
summary.json    totals
seal.json       sha256 of the manifest; written last
model/          the trained model where it was kept; its files' sha256 are in the manifest, and it may be moved away
report.html, logs/, locate/, tracking/   derived or incidental, outside the seal
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MANIFEST, TIMELINE, SUMMARY, SEAL = "manifest.json", "timeline.jsonl", "summary.json", "seal.json"
REPORT, LOGS, ROUTES, STEPS, LOCATE, MODEL = "report.html", "logs", "routes", "steps", "locate", "model"
LOCATED = "located.json"  # in LOCATE
TRACES, TRACKING = "trace", "tracking"
MANIFEST_SCHEMA, SEAL_SCHEMA = "samebits.manifest/2", "samebits.seal/1"
# Sections of the manifest that are recorded before the run and again under "after".
WATCHED = ("inputs", "packages", "platform", "source")
_PARTIAL = ".partial"
# a page may be under way, or left by somebody who was killed
_OUTSIDE = (REPORT, REPORT + _PARTIAL, LOGS, LOCATE, TRACKING, MODEL)


class RunDirectory:
    """A run being written. `create` refuses a directory that already holds one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """Makes the directory and its folders. Raises FileExistsError if a run lies there, or OSError."""
        for name in (MANIFEST, TIMELINE, SEAL):
            if os.path.lexists(path / name):
                raise FileExistsError(f"{path} already holds a run ({name}): choose another --run-dir or remove it")
        if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
            raise FileExistsError(f"{path} holds something else: choose a new or an empty directory for --run-dir")
        path.mkdir(parents=True, exist_ok=True)
        for folder in (STEPS, ROUTES, LOGS):
            (path / folder).mkdir()  # of two runs that begin here at the same time, one is refused
        return cls(path)

    def write(self, name: str, content: bytes) -> str:
        """Writes one file whole or not at all, and returns its sha256. Raises OSError."""
        write_whole(self.path / name, content)
        return hashlib.sha256(content).hexdigest()

    def write_json(self, name: str, record: Mapping[str, Any]) -> str:
        """As `write`, for a JSON object. Raises ValueError for a float that is not finite."""
        return self.write(name, json_bytes(record))

    def seal(self, manifest: Mapping[str, Any]) -> None:
        """Lists every file in the manifest, writes it, then the seal. Nothing may follow."""
        files = [
            {
                "path": name,
                "bytes": (self.path / name).stat().st_size,
                "sha256": sha256_file(self.path / name),
            }
            for name in sealed_files(self.path)
        ]
        digest = self.write_json(MANIFEST, {**manifest, "files": files})
        self.write_json(SEAL, {"schema": SEAL_SCHEMA, "manifest_sha256": digest})


def write_whole(target: Path, content: bytes) -> None:
    """Writes one file whole or not at all. Raises OSError."""
    partial = target.with_name(target.name + _PARTIAL)
    # Both names may be links that somebody else laid out: neither is followed.
    partial.unlink(missing_ok=True)
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:  # an interruption leaves nothing behind either
        partial.unlink(missing_ok=True)
        raise


def json_bytes(record: Mapping[str, Any]) -> bytes:
    """A JSON object as a file's content. Raises ValueError for a float that is not finite."""
    return (json.dumps(record, allow_nan=False, indent=2) + "\n").encode()


def sealed_files(run: Path) -> Iterator[str]:
    """Relative paths, sorted, of everything that a manifest must list."""
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if name in (MANIFEST, SEAL) or name.split("/")[0] in _OUTSIDE:
            continue
        if path.is_symlink() or not path.is_dir():
            yield name


def sha256_file(path: Path) -> str:
    """The sha256 of a file's content, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
