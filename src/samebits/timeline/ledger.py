"""timeline.jsonl: an append-only file, one event a line, on disk before the next step begins."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from samebits.timeline.events import Event, from_line, to_line


class Ledger:
    """The writer. Creates the file and refuses an existing one; every `append` is flushed to the system.

    Use as a context manager, or call `close`. A failed write removes its own torn line, so what was
    recorded earlier stays readable.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._file = os.open(path, flags, 0o644)
        self._seq = 0
        self._size = 0

    def append(self, event: Event) -> None:
        """Writes one line. OSError when the disk does not take it, ValueError for a non-finite float."""
        line = (to_line(event, self._seq, time.time()) + "\n").encode()
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._seq += 1
        self._size += len(line)

    def sync(self) -> None:
        """Asks the system to put everything appended so far on the disk itself."""
        os.fsync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What a reader found: events up to the first bad line, their times, and what was wrong there."""

    events: tuple[Event, ...]
    times: tuple[float, ...]
    problem: str | None


def read(path: Path) -> Timeline:
    """Reads a ledger, finished or not. A torn or malformed line ends the reading and is named in `problem`.

    Raises OSError when the file cannot be read.
    """
    data = path.read_bytes()
    lines = data.split(b"\n")
    tail = lines.pop()
    events: list[Event] = []
    times: list[float] = []
    problem = None
    for number, line in enumerate(lines, start=1):
        try:
            seq, when, event = from_line(line.decode("utf-8"))
        except ValueError as error:
            problem = f"line {number}: {error}"
            break
        if seq != number - 1:
            problem = f"line {number}: seq is {seq}, want {number - 1}: a line is missing or out of place"
            break
        events.append(event)
        times.append(when)
    if problem is None and tail:
        problem = f"line {len(lines) + 1}: torn, {len(tail)} bytes without an end of line"
    return Timeline(events=tuple(events), times=tuple(times), problem=problem)
