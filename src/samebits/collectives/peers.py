"""The processes behind the ranks of a group: who they are, and whether they still run."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_LAYOUT = struct.Struct("<q56s")
CARD_BYTES = _LAYOUT.size


@dataclass(frozen=True)
class Card:
    """Where a rank runs: host name (its first 56 bytes) and process id."""

    host: str
    pid: int

    @classmethod
    def own(cls) -> Card:
        return cls(socket.gethostname()[:56], os.getpid())

    def to_bytes(self) -> bytes:
        """CARD_BYTES bytes."""
        return _LAYOUT.pack(self.pid, self.host.encode()[:56])

    @classmethod
    def from_bytes(cls, data: bytes) -> Card:
        pid, host = _LAYOUT.unpack(data)
        return cls(host.rstrip(b"\0").decode(errors="replace"), pid)


class Peers:
    """All ranks of a group by their cards. Only processes of this host can be watched.

    `numbers` are the names of the ranks outside of the group, where they have others there.
    """

    def __init__(self, cards: Sequence[Card], numbers: Sequence[int] | None = None) -> None:
        self.cards = tuple(cards)
        self.numbers = tuple(range(len(cards)) if numbers is None else numbers)
        here = Card.own().host
        # Handles and not process ids: an id may be given to another process. One that can't be opened has ended.
        self._handles = [_open(card.pid) if card.host == here else None for card in cards]
        self._gone = [card.host == here and not handle for card, handle in zip(cards, self._handles, strict=True)]

    def name(self, rank: int) -> str:
        """`rank 2 (process 4711)`."""
        return f"rank {self.numbers[rank]} (process {self.cards[rank].pid})"

    def ended(self, rank: int) -> bool:
        """Whether the rank's process is known to have ended."""
        handle = self._handles[rank]
        if handle is None:
            return self._gone[rank]
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        for handle in self._handles:
            if handle is not None:
                os.close(handle)
        self._handles = [None] * len(self._handles)


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
