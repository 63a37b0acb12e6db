"""Watching over kernels that wait for other ranks: a thread of the host that ends a wait which can't succeed.

A kernel polls memory and can't see whether a process died. After some time of waiting it stores, beside the rank that
it waits for, its generation in pinned memory that the host reads, and looks at a word there: when the host stores 1 in
it, every wait of this rank ends, now and later, and its results are NaN.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from samebits.collectives.errors import CollectiveError, RankFailed, RankLate, RankLost
from samebits.collectives.notices import FOLLOWED, Notices
from samebits.collectives.peers import Peers

SLICE = 0.1
# A wait that was not heard of for so long has ended; kernels that share a card are silent while others run.
_SILENCE = 2.0
_LEFT = "left the group"


class Watch:
    """One rank's watch over one group. `words` is what its kernels are given: int64 [1 + ranks], pinned."""

    def __init__(self, group: dist.ProcessGroup, peers: Peers, name: str, timeout: float) -> None:
        """`name` is the same on every rank and new in the group; `timeout` is how many seconds a kernel may wait."""
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        self.words = torch.zeros(1 + group.size(), dtype=torch.int64, pin_memory=torch.cuda.is_available())
        self._view = self.words.numpy()
        self._peers, self._timeout = peers, timeout
        self._notices = Notices(group, name)
        self._gone: dict[int, float] = {}  # when a rank was first seen to have left or ended
        self._problem: CollectiveError | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samebits-collectives", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what was found, if anything was."""
        if self._problem is not None:
            raise self._problem

    def fail(self, error: BaseException) -> None:
        """Make every other rank raise RankFailed with this error; the first error stays."""
        text = f"{type(error).__name__}: {error}"
        self._give_up(RankFailed(f"this rank met an error before: {text}"), text)

    def close(self) -> None:
        """Leave the group."""
        self._give_up(RankLost("this rank has left the group; attach it again"), _LEFT)
        self._ended.set()
        self._thread.join()
        self._peers.close()

    def _run(self) -> None:
        waits: dict[tuple[int, int], tuple[float, float]] = {}  # (rank, generation) -> first and last heard of
        while not self._ended.wait(SLICE):
            now = time.monotonic()
            for rank, generation in self._heard():
                first, _ = waits.get((rank, generation), (now, now))
                waits[rank, generation] = first, now
            waits = {wait: heard for wait, heard in waits.items() if now - heard[1] < _SILENCE}
            if waits and self._problem is None:
                # what counts is when it was last heard of: it may have ended since
                problem = self._reason({rank: heard for (rank, _), heard in waits.items()})
                if problem is not None:
                    self._give_up(problem, f"{FOLLOWED}{problem}")

    def _heard(self) -> Iterator[tuple[int, int]]:
        for rank in range(self._view.size - 1):
            if said := int(self._view[1 + rank]):
                self._view[1 + rank] = 0
                yield rank, said

    def _reason(self, waits: dict[int, tuple[float, float]]) -> CollectiveError | None:
        """Why the ranks that are waited for will not come; None while they still may, or the wait may have ended.

        `waits` has when a wait for each was first and last heard of.
        """
        said = self._notices.found("word")
        for rank in (r for r in said if said[r] != _LEFT):
            return RankFailed(f"{self._peers.name(rank)} failed before a collective that needs it: {said[rank]}")
        for rank, (_, last) in waits.items():
            if not self._peers.ended(rank) and rank not in said:
                continue
            if rank not in self._gone:
                self._view[1 + rank] = 0  # only a wait that goes on says it again
                self._gone[rank] = time.monotonic()
            elif last > self._gone[rank]:
                how = _LEFT if rank in said else "ended"
                return RankLost(f"{self._peers.name(rank)} {how} before a collective that needs it")
        late = [rank for rank, (first, last) in sorted(waits.items()) if last - first > self._timeout]
        if not late:
            return None
        names = ", ".join(self._peers.name(rank) for rank in late)
        return RankLate(f"{names} did not reach a collective on the device within {self._timeout:g} s")

    def _give_up(self, problem: CollectiveError, word: str) -> None:
        with self._lock:
            if self._problem is not None:
                return
            self._problem = problem
        self._view[0] = 1
        self._notices.leave("word", word)
