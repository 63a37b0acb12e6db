"""What happens when a part dies, the disk fills or the user stops: a clear error, earlier records intact, no seal."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samebits.evidence.verdict import Verdict
from samebits.evidence.verify import verify
from samebits.timeline.ledger import read

LONG = {"num_rollout": 500}


def assert_readable_and_unsealed(run: Path) -> None:
    assert not (run / "seal.json").exists()
    timeline = read(run / "timeline.jsonl")
    assert timeline.problem is None
    found = verify(run)
    assert found.verdict is Verdict.CANNOT_TELL
    assert "not sealed" in found.problems[0]
    assert found.totals["steps"] >= 1


def assert_nothing_is_left(job) -> None:
    """No process of the job's session lives on."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        left = [pid for pid in session(job.process.pid) if state(pid) != "Z"]
        if not left:
            return
        time.sleep(0.2)
    pytest.fail(f"still alive: {left}")


def session(leader: int) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if field(pid, 3) == str(leader)]


def state(pid: int) -> str:
    return field(pid, 0)


def field(pid: int, index: int) -> str:
    """One field of /proc/pid/stat after the command: 0 is the state, 3 the session."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[index]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


@pytest.mark.parametrize(
    ("host", "who"), [("rollout-engine-0", "rollout engine 0"), ("trainer-rank-0", "trainer rank 0")]
)
def test_a_killed_process_is_named(start: Callable, host: str, who: str) -> None:
    # Two workers, which wait for each other in native code, must not outlive their engine.
    job = start("run", rollout_tp=2, **LONG)
    job.wait_for("timed")
    os.kill(job.hosts(host)[0], signal.SIGKILL)
    assert job.wait() == Verdict.CANNOT_TELL.exit_code
    assert f"error: {who} (pid " in job.output
    assert "killed by SIGKILL) died during" in job.output
    assert "Traceback" not in job.output
    assert_readable_and_unsealed(job.path)
    assert_nothing_is_left(job)


def test_one_of_several_dies_and_nobody_hangs(start: Callable) -> None:
    """A trainer rank that waits for its dead peer inside a collective is ended too; so is a vLLM worker's engine."""
    job = start("run", train_tp=2, rollout_tp=2, **LONG)
    job.wait_for("timed")
    workers = job.hosts("rollout-engine-0")[1:]
    assert len(workers) >= 2
    os.kill(workers[-1], signal.SIGKILL)
    assert job.wait() == Verdict.CANNOT_TELL.exit_code
    assert "rollout engine 0" in job.output
    assert_readable_and_unsealed(job.path)
    assert_nothing_is_left(job)


def test_a_dead_trainer_rank_ends_its_waiting_peer(start: Callable) -> None:
    job = start("run", train_tp=2, **LONG)
    job.wait_for("timed")
    os.kill(job.hosts("trainer-rank-1")[0], signal.SIGKILL)
    assert job.wait() == Verdict.CANNOT_TELL.exit_code
    assert "error: trainer rank 1 (pid " in job.output
    assert_readable_and_unsealed(job.path)
    assert_nothing_is_left(job)


def test_an_interrupted_run_is_readable(start: Callable) -> None:
    job = start("run", **LONG)
    job.wait_for("timed")
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait() == 130
    assert "interrupted" in job.output
    assert "not sealed" in job.output
    assert "Traceback" not in job.output
    assert_readable_and_unsealed(job.path)
    assert_nothing_is_left(job)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 KiB at tmp_path / run."""
    path = tmp_path / "run"
    path.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(path)], capture_output=True)
    if not made or made.returncode:
        pytest.skip("mounting a small file system needs root and CAP_SYS_ADMIN")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_is_named(start: Callable, small_disk: Path) -> None:
    job = start("run", **LONG)
    assert job.wait() == Verdict.CANNOT_TELL.exit_code
    assert "No space left on device" in job.output
    assert "Traceback" not in job.output
    assert_readable_and_unsealed(small_disk)
    assert_nothing_is_left(job)
