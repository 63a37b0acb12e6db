"""A directory from somebody who means harm can neither exhaust nor mislead whoever verifies or reports it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tampering import STEP, edit_json

import samebits
from samebits.evidence.store import RunDirectory
from samebits.evidence.verify import verify
from samebits.report import write_report


def pretend(run: Path, name: str, size: int) -> None:
    """A file that is said to be, and looks, far larger than what it holds."""
    os.truncate(run / name, size)
    entry = {"path": name, "bytes": size, "sha256": "0" * 64}
    edit_json(run / "manifest.json", lambda m: m["files"].insert(0, entry))
    digest = hashlib.sha256((run / "manifest.json").read_bytes()).hexdigest()
    edit_json(run / "seal.json", lambda s: s.update(manifest_sha256=digest))


def relink(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


# Refused before anything large or foreign is read.
HOSTILE = {
    "endless timeline": (lambda run: relink(run / "timeline.jsonl", "/dev/zero"), "timeline.jsonl"),
    "timeline elsewhere": (lambda run: relink(run / "timeline.jsonl", "/etc/hostname"), "is a symbolic link"),
    "seal elsewhere": (lambda run: relink(run / "seal.json", "/dev/zero"), "seal.json is missing"),
    "huge timeline": (lambda run: os.truncate(run / "timeline.jsonl", 1 << 40), "timeline.jsonl is larger than"),
    "huge sidecar": (lambda run: pretend(run, STEP, 1 << 40), f"{STEP} is larger than"),
    "huge manifest": (lambda run: os.truncate(run / "manifest.json", 1 << 40), "manifest.json is larger than"),
    "deep manifest": (lambda run: (run / "manifest.json").write_text("[" * 100_000), "manifest.json is not valid JSON"),
    "long number": (lambda run: (run / "seal.json").write_text("9" * 100_000), "seal.json is not valid JSON"),
    "steps elsewhere": (
        lambda run: ((run / "steps").rename(run.parent / "steps"), (run / "steps").symlink_to(run.parent / "steps")),
        "is a symbolic link",
    ),
    "a pipe": (lambda run: ((run / STEP).unlink(), os.mkfifo(run / STEP)), f"{STEP} is missing"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_directory_cannot_exhaust_or_mislead(run: Path, name: str) -> None:
    harm, message = HOSTILE[name]
    harm(run)
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))\n"
    limited += "from samebits.evidence.verify import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-S", "-c", limited, str(run)]
    done = subprocess.run(
        command, cwd=Path(samebits.__file__).parent.parent, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (2, "")
    assert message in done.stdout


def test_a_report_is_written_into_the_folder_and_nowhere_else(run: Path, tmp_path: Path) -> None:
    for name in ("report.html", "report.html.partial"):
        (tmp_path / name).write_text("precious")
        (run / name).symlink_to(tmp_path / name)
    page = write_report(run)
    assert page.read_text().startswith("<!doctype html>")
    assert not page.is_symlink()
    assert {(tmp_path / name).read_text() for name in ("report.html", "report.html.partial")} == {"precious"}


@pytest.mark.parametrize("path", ["/etc/passwd", "../run2/x", "steps/../../x", "", "a//b", "./summary.json"])
def test_a_manifest_cannot_point_outside(run: Path, path: str) -> None:
    entry = {"path": path, "bytes": 1, "sha256": "0"}
    edit_json(run / "manifest.json", lambda m: m["files"].insert(0, entry))
    digest = hashlib.sha256((run / "manifest.json").read_bytes()).hexdigest()
    edit_json(run / "seal.json", lambda s: s.update(manifest_sha256=digest))
    assert "leaves the run directory or is not plain" in verify(run).problems[0]


def test_a_page_that_was_interrupted_costs_no_verdict(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(file: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_report(run)
    assert not list(run.glob("report.html*"))
    (run / "report.html.partial").touch()  # of a killed one
    assert verify(run).problems == ()


def test_of_two_runs_that_begin_in_one_directory_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunDirectory.create(tmp_path / "run")
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(()))  # as the second saw it a moment before
    with pytest.raises(FileExistsError):
        RunDirectory.create(tmp_path / "run")
