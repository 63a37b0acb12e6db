"""Ranks as forked processes, with or without shared memory between them: cheap enough to try every point."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.collectives.exchange import PeerExchange
from samebits.collectives.memory import HostMemory
from samebits.collectives.peers import Card, Peers

Program = Callable[[PeerExchange, int], Any]


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: what it returned or raised, the signal that killed it, after how many seconds."""

    value: Any
    error: str
    signal: int
    seconds: float


class Watched:
    """HostMemory that calls `at(point)` before and after everything that a round does with memory."""

    POINTS = ("payload", "announce", "announced", "set_word", "wait_word", "word")

    def __init__(self, memory: HostMemory, at: Callable[[str], None]) -> None:
        self._memory, self._at = memory, at

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._memory, name)
        if name not in self.POINTS:
            return found

        def watched(*args: Any) -> Any:
            self._at(f"before {name}")
            result = found(*args)
            self._at(f"after {name}")
            return result

        return watched


def fork_ranks(ranks: int, program: Callable[[int, list[int]], Any]) -> list[Outcome]:
    """program(rank, process ids of all ranks) in `ranks` forked processes."""
    children = []
    for rank in range(ranks):
        (ids_read, ids_write), (out_read, out_write) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _child(rank, program, json.loads(_line(ids_read)), out_write)
            except BaseException:  # noqa: BLE001 - a forked child must never come back into the test runner
                traceback.print_exc()
            finally:
                os._exit(0)
        for end in (ids_read, out_write):
            os.close(end)
        children.append((pid, ids_write, out_read))
    pids = json.dumps([pid for pid, _, _ in children]).encode() + b"\n"
    for _, ids_write, _ in children:
        os.write(ids_write, pids)
        os.close(ids_write)
    try:
        return [_outcome(pid, out) for pid, _, out in children]
    finally:
        for pid, _, _ in children:
            _end(pid)


def run_forked(
    ranks: int,
    program: Program,
    *,
    at: Callable[[int], Callable[[str], None]] | None = None,
    exchange: type[PeerExchange] = PeerExchange,
    timeout: float = 20.0,
    capacity: int = 4096,
) -> list[Outcome]:
    """program(exchange, rank) in `ranks` processes; `at(rank)(point)` is called around every use of memory."""
    memories = [HostMemory(capacity) for _ in range(ranks)]

    def with_exchange(rank: int, pids: list[int]) -> Any:
        memory: Any = memories[rank]
        host = Card.own().host
        peers = Peers([Card(host, pid) for pid in pids])
        memory.join(rank, peers, [m.handle for m in memories])
        if at is not None:
            memory = Watched(memory, at(rank))
        return program(exchange(memory, peers, timeout), rank)

    try:
        return fork_ranks(ranks, with_exchange)
    finally:
        for memory in memories:
            memory.close()


def _child(rank: int, program: Callable[[int, list[int]], Any], pids: list[int], out: int) -> None:
    # The threads of the parent's OpenMP are not there in a forked process.
    torch.set_num_threads(1)
    began = time.monotonic()
    value, error = None, ""
    try:
        value = program(rank, pids)
    except Exception as caught:  # noqa: BLE001 - what came out is what the test looks at
        error = f"{type(caught).__name__}: {caught}"
    os.write(out, json.dumps([value, error, time.monotonic() - began]).encode() + b"\n")


def _line(end: int) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        chunk = os.read(end, 65536)
        if not chunk:
            break
        data += chunk
    os.close(end)
    return data


def _outcome(pid: int, out: int) -> Outcome:
    line = _line(out)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return Outcome(None, "", os.WTERMSIG(status), 0.0)
    assert line, f"process {pid} ended with status {status} and said nothing"
    value, error, seconds = json.loads(line)
    return Outcome(value, error, 0, seconds)


def _end(pid: int) -> None:
    try:
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    except ChildProcessError:
        pass


def partial_of(rank: int, turn: int, count: int) -> Tensor:
    """fp32 values of many magnitudes, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    exponents = torch.randint(-8, 9, (count,), generator=generator).float()
    return torch.randn(count, generator=generator) * torch.exp2(exponents)
