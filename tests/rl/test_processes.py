"""Hosting processes: results come back, and whoever dies, fails or hangs is named, without waiting for the rest."""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits.rl.processes import Group, close, gather_starts
from samebits.rl.protocols import RunFailed


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Group]:
    """Two processes that each host the `time` and the `os` module in place of an engine."""
    group = Group(["trainer rank 0", "trainer rank 1"], tmp_path)
    group.gather("start", group.start(importlib.import_module, [("time",), ("os",)]), 30)
    yield group
    pids = [host.pid for host in group.hosts]
    group.kill()
    # multiprocessing's own list may lag: the executor's thread reaps the same children
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_results_come_back_in_the_order_of_the_hosts(pair: Group) -> None:
    results = pair.gather("look", [pair.hosts[0].call("time"), pair.hosts[1].call("getpid")], 30)
    assert results[0] == pytest.approx(time.time(), abs=60)
    assert results[1] == pair.hosts[1].pid


def test_an_exception_names_the_host_and_its_log(pair: Group) -> None:
    with pytest.raises(RunFailed, match=r"trainer rank 1 failed during listing: FileNotFoundError: .*rank-1\.log"):
        pair.gather("listing", [pair.hosts[0].call("time"), pair.hosts[1].call("listdir", "/absent")], 30)


def test_a_call_of_the_first_host_alone_names_it(pair: Group) -> None:
    assert pair.first("time", timeout=30) == pytest.approx(time.time(), abs=60)
    with pytest.raises(RunFailed, match=r"trainer rank 0 failed during sleep: TypeError"):
        pair.first("sleep", "long", timeout=30)


@pytest.mark.parametrize(
    ("method", "args", "ended"), [("_exit", (3,), "exit code 3"), ("abort", (), "killed by SIGABRT")]
)
def test_a_death_is_named_while_its_peer_still_works(pair: Group, method, args, ended) -> None:
    began = time.monotonic()
    with pytest.raises(RunFailed, match=rf"trainer rank 1 \(pid \d+, {ended}\) died during train_step"):
        pair.gather("train_step", [pair.hosts[0].call("sleep", 60), pair.hosts[1].call(method, *args)], 30)
    assert time.monotonic() - began < 15


def test_a_death_between_two_calls_is_named(pair: Group) -> None:
    pid = pair.hosts[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"trainer rank 0 \(pid \d+, killed by SIGKILL\) died during export"):
        pair.gather("export", [pair.hosts[0].call("time"), pair.hosts[1].call("getpid")], 30)


def test_a_hang_ends_at_its_deadline(pair: Group) -> None:
    with pytest.raises(RunFailed, match="trainer rank 0 did not finish publish within 1 s"):
        pair.gather("publish", [pair.hosts[0].call("sleep", 60), pair.hosts[1].call("getpid")], 1)


def test_what_a_host_prints_goes_to_its_log(pair: Group, tmp_path: Path) -> None:
    pair.gather("print", [pair.hosts[0].call("time"), pair.hosts[1].call("system", "echo heard")], 30)
    assert "heard" in (tmp_path / "trainer-rank-1.log").read_text()


def test_who_fails_to_start_does_not_wait_for_others_to_start(tmp_path: Path) -> None:
    slow, broken = Group(["trainer rank 0"], tmp_path), Group(["rollout engine 0"], tmp_path)
    began = time.monotonic()
    try:
        starts = (slow, slow.start(time.sleep, [(60,)])), (broken, broken.start(importlib.import_module, [("absent",)]))
        with pytest.raises(RunFailed, match="rollout engine 0 failed during start: ModuleNotFoundError"):
            gather_starts(*starts, timeout=90)
    finally:
        slow.kill()
    assert time.monotonic() - began < 45


class Leaver:
    """Takes its time to end: until all others are ending, too, which it writes down."""

    def __init__(self, folder: Path, number: int, count: int) -> None:
        self._folder, self._number, self._count = folder, number, count

    def close(self) -> None:
        atexit.register(self._leave)

    def _leave(self) -> None:
        (self._folder / f"leaving-{self._number}").touch()
        ends = time.monotonic() + 15
        while len(list(self._folder.glob("leaving-*"))) < self._count:
            if time.monotonic() > ends:
                return
            time.sleep(0.01)
        (self._folder / f"together-{self._number}").touch()


def test_processes_of_all_groups_end_together(tmp_path: Path) -> None:
    groups = [Group([f"trainer rank {rank}" for rank in range(2)], tmp_path), Group(["rollout engine 0"], tmp_path)]
    numbers = iter(range(3))
    for group in groups:
        group.gather("start", group.start(Leaver, [(tmp_path, next(numbers), 3) for _ in group.hosts]), 30)
    close(*groups)
    assert sorted(path.name for path in tmp_path.glob("together-*")) == [f"together-{number}" for number in range(3)]


def test_a_constructor_that_fails_is_named(tmp_path: Path) -> None:
    group = Group(["rollout engine 0"], tmp_path)
    with pytest.raises(RunFailed, match="rollout engine 0 failed during start: ModuleNotFoundError"):
        group.gather("start", group.start(importlib.import_module, [("absent_module",)]), 30)


def test_hosts_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import importlib, os, signal, pathlib\n"
        "from samebits.rl.processes import Group\n"
        "if __name__ == '__main__':\n"
        f"    group = Group(['engine'], pathlib.Path({str(tmp_path)!r}))\n"
        "    group.gather('start', group.start(importlib.import_module, [('time',)]), 30)\n"
        "    print(group.hosts[0].pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    parent = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert parent.returncode == -signal.SIGKILL
    pid = int(parent.stdout)
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
