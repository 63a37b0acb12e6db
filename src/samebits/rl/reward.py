"""The rule-based reward: 1.0 when the last boxed answer of a response equals the label, else 0.0.

Plain integers are compared here. Everything else is judged by `math-verify` in a process of its own, because
a response can contain an expression whose evaluation never ends inside one C call, which neither a signal
nor a thread could stop.
"""

from __future__ import annotations

import atexit
import json
import logging
import re
import select
import subprocess
import sys
import threading
from functools import lru_cache
from typing import IO

LONGEST_ANSWER = 256
_START_SECONDS = 120.0
_JUDGE_SECONDS = 20.0
_INTEGER = re.compile(r"[+-]?[0-9]{1,300}")
_BOXED = "\\boxed{"

logger = logging.getLogger(__name__)


def reward(response: str, label: str) -> float:
    """1.0 if the last `\\boxed{...}` of `response` equals `label` in value, 0.0 otherwise; never in between.

    No box, an unclosed box, an answer of more than 256 characters, one that cannot be read and one that
    cannot be compared within 20 seconds all earn 0.0. Raises for no response; RuntimeError only where
    `math-verify` cannot be started at all.
    """
    answer = last_boxed(response)
    if answer is None or len(answer) > LONGEST_ANSWER:
        return 0.0
    return float(_is_equal(answer.strip(), label.strip()))


def last_boxed(response: str) -> str | None:
    """What stands inside the braces of the last `\\boxed{`, or None if there is none or it is not closed."""
    start = response.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    depth = 1
    for position in range(start, len(response)):
        if response[position] in "{}" and response[position - 1] != "\\":
            depth += 1 if response[position] == "{" else -1
            if depth == 0:
                return response[start:position]
    return None


@lru_cache(maxsize=1 << 14)
def _is_equal(answer: str, label: str) -> bool:
    if not answer:
        return False
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(label):
        return int(answer) == int(label)
    return _judge.is_equal(answer, label)


class Judge:
    """`math-verify` behind a pipe: started when first needed, replaced when it dies or takes too long."""

    def __init__(self, seconds: float = _JUDGE_SECONDS) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def is_equal(self, answer: str, label: str) -> bool:
        """Whether math-verify finds both equal in value. False, with a warning, where it finds no end."""
        with self._lock:
            verdict = self._ask(json.dumps([answer, label]).encode() + b"\n")
        if verdict is None:
            logger.warning("no verdict on the answer %r within %g s: it earns no reward", answer, self._seconds)
        return verdict == b"1\n"

    def close(self) -> None:
        """Ends the process; the next question starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _pipe(process.stdin).close()
            _pipe(process.stdout).close()

    def _ask(self, question: bytes) -> bytes | None:
        process = self._running()
        try:
            _pipe(process.stdin).write(question)
            _pipe(process.stdin).flush()
        except BrokenPipeError:
            self.close()
            return None
        verdict = _read_line(process, self._seconds)
        if verdict is None:
            self.close()
        return verdict

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            command = [sys.executable, "-m", "samebits.rl.judge"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            if _read_line(self._process, _START_SECONDS) != b"ready\n":
                self.close()
                raise RuntimeError(f"math-verify did not start: run `{' '.join(command)}` to see why")
        return self._process


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """The next line, or None when it does not come in time or the process has died."""
    readable, _, _ = select.select([_pipe(process.stdout)], [], [], seconds)
    return (_pipe(process.stdout).readline() or None) if readable else None


_judge = Judge()
atexit.register(_judge.close)
