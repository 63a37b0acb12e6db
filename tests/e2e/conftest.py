"""Whole jobs with the real vLLM and the real Megatron-Core, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SMALL = {
    "num-rollout": 2,
    "samples-per-prompt": 2,
    "global-batch-size": 8,
    "max-response-length": 16,
    "max-tokens-per-gpu": 512,
    "eval-interval": 0,
}
DEADLINE = 400.0


@dataclass
class Running:
    """A job that was started, and where its records go."""

    path: Path
    process: subprocess.Popen[str]
    output: str = field(default="")

    def wait(self) -> int:
        """Its exit code; `output` then holds what it printed."""
        try:
            self.output = self.process.communicate(timeout=DEADLINE)[0]
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.output = self.process.communicate()[0]
            pytest.fail(f"the job hangs; it printed:\n{self.output}\n{self.logs()}")
        return self.process.returncode

    def wait_for(self, kind: str, count: int = 1) -> None:
        """Returns when the timeline holds `count` lines of a kind."""
        end = time.monotonic() + DEADLINE
        timeline = self.path / "timeline.jsonl"
        while time.monotonic() < end:
            if timeline.is_file() and timeline.read_text().count(f'"kind":"{kind}"') >= count:
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        self.process.kill()
        pytest.fail(f"no {count} x {kind} came; the job printed:\n{self.process.communicate()[0]}\n{self.logs()}")

    def hosts(self, name: str) -> list[int]:
        """Pids of the processes that write this log: a host first, then the workers that it started."""
        log = self.path / "logs" / f"{name}.log"
        return [pid for pid in sorted(descendants(self.process.pid)) if prints_to(pid, log)]

    def logs(self) -> str:
        """The ends of its processes' logs."""
        ends = (f"--- {log.name}\n{log.read_text()[-2000:]}" for log in sorted(self.path.glob("logs/*")))
        return "\n".join(ends)


def descendants(pid: int) -> Iterator[int]:
    """All living descendants of a process."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return
    for child in children:
        yield int(child)
        yield from descendants(int(child))


def prints_to(pid: int, log: Path) -> bool:
    try:
        target = Path(os.readlink(f"/proc/{pid}/fd/1"))  # noqa: PTH115 - a deleted target has no Path
    except (FileNotFoundError, PermissionError):
        return False
    return target == log.resolve()


Start = Callable[..., Running]


@contextmanager
def starting(folder: Path) -> Iterator[Start]:
    """start(name, **flags) begins a small job in folder / name; flags override the small ones."""
    running: list[Running] = []

    def begin(name: str, **flags: object) -> Running:
        settings = {**SMALL, **{key.replace("_", "-"): value for key, value in flags.items()}}
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value)) if value is not True]
        words += [f"--{key}" for key, value in settings.items() if value is True]
        command = [sys.executable, "-m", "samebits.cli.main", "run", "--run-dir", str(folder / name), *words]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        running.append(Running(folder / name, process))
        return running[-1]

    yield begin
    for job in running:
        if job.process.poll() is None:
            job.process.kill()
            job.process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as begin:
        yield begin


@pytest.fixture(scope="module")
def start_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """The same for jobs that several tests of a file look at."""
    with starting(tmp_path_factory.mktemp("shared")) as begin:
        yield begin
