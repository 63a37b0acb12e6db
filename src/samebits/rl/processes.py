"""One process per rollout engine and per trainer rank, reached through one-worker executors.

A process that dies, hangs or raises ends the run with a message that names it. When one of a group fails,
its peers may wait for it for ever inside a collective, so the whole group is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path
from typing import Any

from samebits.rl.protocols import RunFailed

Factory = Callable[..., Any]


class Host:
    """One object in a process of its own. Methods are called by name; results come back as futures."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(max_workers=1, mp_context=context)
        before = {child.pid for child in multiprocessing.active_children()}
        self._ready = self._executor.submit(_prepare, str(log))
        self._process = next(c for c in multiprocessing.active_children() if c.pid not in before)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def start(self, factory: Factory, *args: Any) -> Future[None]:
        """Builds the hosted object there: factory(*args)."""
        return self._submit(_build, factory, args)

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Calls one method of the hosted object there."""
        return self._submit(_call, method, args)

    def _submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        try:
            return self._executor.submit(function, *args)
        except BrokenProcessPool as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def describe(self) -> str:
        """Name, pid and how the process ended, if it did."""
        self._process.join(timeout=1)
        code = self._process.exitcode
        if code is None:
            return f"{self.name} (pid {self.pid})"
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{self.name} (pid {self.pid}, {ended})"

    def dismiss(self) -> None:
        """Lets the process end by itself after its last call."""
        self._executor.shutdown(wait=False)

    def finish(self, timeout: float) -> None:
        """Waits so long for a dismissed process, then ends it."""
        self._process.join(timeout)
        self.kill()

    def kill(self) -> None:
        """Ends the process at once and forgets its pending calls."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._process.kill()
        self._process.join()


class Group:
    """Hosts that work together: one failure, or one deadline missed, is the failure of all."""

    def __init__(self, names: Sequence[str], logs: Path) -> None:
        self.hosts: list[Host] = []
        try:
            for name in names:
                self.hosts.append(Host(name, logs / f"{name.replace(' ', '-')}.log"))
        except BaseException:
            self.kill()
            raise

    def start(self, factory: Factory, arguments: Sequence[tuple[Any, ...]]) -> list[Future[None]]:
        """Begins to build every hosted object; `gather` waits for the futures."""
        return [host.start(factory, *args) for host, args in zip(self.hosts, arguments, strict=True)]

    def everyone(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """Calls the same method of every host with the same arguments; results in order of the hosts."""
        return self.gather(method, [host.call(method, *args) for host in self.hosts], timeout)

    def first(self, method: str, *args: Any, timeout: float) -> Any:
        """The result of one method of the first host alone."""
        (answer,) = self.gather(method, [self.hosts[0].call(method, *args)], timeout)
        return answer

    def gather(self, doing: str, pending: Sequence[Future[Any]], timeout: float, waited: float = 0.0) -> list[Any]:
        """Waits for one future of each of the first hosts, `timeout` seconds at most, of which `waited` are over.

        Raises RunFailed that names who failed, after killing the group.
        """
        done, late = wait(pending, timeout=max(0.0, timeout - waited), return_when=FIRST_EXCEPTION)
        failed = [future for future in done if future.exception() is not None]
        if not failed and not late:
            return [future.result() for future in pending]
        if failed:
            # The others of a group often fail because of the first: give a death the time to show itself.
            time.sleep(0.2)
            failed = [future for future in pending if future.done() and future.exception() is not None]
        message, cause = self._explain(doing, pending, failed, timeout)
        self.kill()
        raise RunFailed(message) from cause

    def _explain(
        self, doing: str, pending: Sequence[Future[Any]], failed: Sequence[Future[Any]], timeout: float
    ) -> tuple[str, BaseException | None]:
        hosts = dict(zip(map(id, pending), self.hosts, strict=False))
        dead = [future for future in failed if isinstance(future.exception(), BrokenProcessPool)]
        if dead:
            who = ", ".join(hosts[id(future)].describe() for future in dead)
            logs = ", ".join(str(hosts[id(future)].log) for future in dead)
            return f"{who} died during {doing}; what it printed is in {logs}", dead[0].exception()
        if failed:
            host, error = hosts[id(failed[0])], failed[0].exception()
            text = f"{type(error).__name__}: {error}"
            return f"{host.name} failed during {doing}: {text} (its log: {host.log})", error
        late = [hosts[id(future)] for future in pending if not future.done()]
        names, logs = ", ".join(host.name for host in late), ", ".join(str(host.log) for host in late)
        return f"{names} did not finish {doing} within {timeout:g} s; what it printed is in {logs}", None

    def kill(self) -> None:
        for host in self.hosts:
            host.kill()


def gather_starts(*starts: tuple[Group, Sequence[Future[None]]], timeout: float) -> None:
    """Waits until every object of several groups is built. Raises RunFailed that names who failed first."""
    began = time.monotonic()
    wait([future for _, ready in starts for future in ready], timeout=timeout, return_when=FIRST_EXCEPTION)
    # a group that failed is asked before one that may still take its time
    for group, ready in sorted(starts, key=lambda start: not any(f.done() and f.exception() for f in start[1])):
        group.gather("start", ready, timeout, waited=time.monotonic() - began)


def close(*groups: Group, timeout: float = 20.0) -> None:
    """Asks every hosted object to close and its process to end, all together, waiting so long for each at most."""
    hosts = [host for group in groups for host in group.hosts]
    wait([host.call("close") for host in hosts], timeout=timeout)
    for host in hosts:
        host.dismiss()
    for host in hosts:
        host.finish(timeout)


_hosted: Any = None


def _prepare(log: str) -> None:
    """First task of a hosting process: its own log, no share in Ctrl-C, and no life after its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    threading.Thread(target=_follow_parent, name="samebits-parent", daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _build(factory: Factory, args: tuple[Any, ...]) -> None:
    global _hosted
    _hosted = factory(*args)


def _call(method: str, args: tuple[Any, ...]) -> Any:
    return getattr(_hosted, method)(*args)
