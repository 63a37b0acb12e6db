"""What a killed job left in the temporary folder goes with the next job; what lives or is not ours stays."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from samebits.scratch import scratch_folder

HOLDER = """
import sys
from samebits.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "v000001").mkdir()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def holder(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another job, and its scratch folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_job_that_ends_leaves_nothing(temporary: Path) -> None:
    with scratch_folder() as folder:
        (folder / "v000001").mkdir()
        assert folder.parent == temporary
    assert list(temporary.iterdir()) == []


def test_a_path_that_must_be_short_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 90)))
    Path(tempfile.gettempdir()).mkdir()
    with scratch_folder(longest=70) as folder:
        assert len(os.fsencode(folder)) <= 70
    assert not folder.exists()


def test_a_killed_job_is_cleared_away_and_a_living_one_is_not(temporary: Path) -> None:
    killed, left = holder(temporary)
    killed.kill()
    killed.communicate()
    assert (left / "v000001").is_dir()
    living, held = holder(temporary)  # its start is the next job
    assert not left.exists()
    with scratch_folder():
        assert (held / "v000001").is_dir()
    living.communicate("")
    assert list(temporary.iterdir()) == []


def test_what_is_not_surely_a_job_s_stays(temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (temporary / "samebits-notes").mkdir()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "lock").touch()
    (temporary / "samebits-link").symlink_to(elsewhere)
    (temporary / "other").mkdir()
    (temporary / "other" / "lock").touch()
    with scratch_folder():
        pass
    assert {path.name for path in temporary.iterdir()} == {"samebits-notes", "samebits-link", "other"}
    assert (elsewhere / "lock").is_file()
