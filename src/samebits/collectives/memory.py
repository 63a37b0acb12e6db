"""Memory that the ranks of one host share: a region per rank, which its owner writes and all others only read.

`PeerMemory` is what the exchange needs of such memory: two halves for payloads, a few words, a note. `HostMemory` is
plain memory of this machine. On GPUs ranks write into each other's memory instead (`peer_memory.py`).
"""

from __future__ import annotations

import mmap
import os
import struct
import warnings
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from samebits.collectives.peers import Peers

# Words of a region. Each lies in a cache line of its own, so that waiting for one does not slow the others.
POSTED, TAKEN, STATE = 0, 1, 2
# Values of the word STATE: at work; left in good order; met an error of its own; raised because of another rank.
ALIVE, CLOSED, FAILED, FOLLOWED = 0, 1, 2, 3

_LINE = 64
_HEADERS = 4 * _LINE
_NOTE = 8 * _LINE
_NOTE_BYTES = 1024
_PAYLOAD = 4096
_HEADER = struct.Struct("<QQQ")
_LENGTH = struct.Struct("<Q")


class PeerMemory(Protocol):
    """The regions of all ranks as one rank sees them. A word only grows; a wait sees all that was written before it."""

    rank: int
    ranks: int
    capacity: int

    def payload(self, rank: int, half: int, length: int) -> Tensor:
        """uint8 [length]: the start of one half of a rank's payload memory, itself and not a copy."""

    def announce(self, half: int, header: tuple[int, int, int]) -> None:
        """Put three numbers beside the payload in one half of the own region."""

    def announced(self, rank: int, half: int) -> tuple[int, int, int]:
        """The three numbers beside a rank's payload."""

    def set_word(self, word: int, value: int) -> None:
        """Store a word of the own region, after everything that was written there before."""

    def word(self, rank: int, word: int) -> int:
        """A word of a rank's region, before anything that is read there afterwards."""

    def wait_word(self, rank: int, word: int, value: int, seconds: float) -> bool:
        """Whether a rank's word came to at least `value` within so many seconds."""

    def leave_note(self, text: str) -> None:
        """Write the text beside the state, cut to what fits."""

    def note(self, rank: int) -> str:
        """The text that a rank left."""

    def close(self) -> None:
        """Let go of all regions."""


class HostMemory:
    """PeerMemory in this machine's memory.

    A region is an anonymous file (memfd): it needs no name that a killed process could leave behind, and no room in
    /dev/shm, which containers keep small. A peer opens it through the owner's entry in /proc.
    """

    def __init__(self, capacity: int) -> None:
        """The own region, with room for `capacity` bytes in each half; `join` adds the others'."""
        from samebits import _cpu  # a machine with GPUs may be without it, and needs none of this

        self._atomics = _cpu
        if capacity < _LINE or capacity % _LINE:
            raise ValueError(f"capacity must be a positive multiple of {_LINE} bytes, got {capacity}")
        self.capacity = capacity
        self.rank, self.ranks = 0, 1
        self._size = _PAYLOAD + 2 * capacity
        self._file = os.memfd_create("samebits-collectives", os.MFD_CLOEXEC)
        os.ftruncate(self._file, self._size)
        self._own = mmap.mmap(self._file, self._size)
        self._maps: list[mmap.mmap] = []
        self._bytes: list[Tensor] = []

    @property
    def handle(self) -> int:
        """What another process of this host needs besides the process id to open the region."""
        return self._file

    def join(self, rank: int, peers: Peers, handles: Sequence[int]) -> None:
        """Open the regions of all ranks; they must live until all ranks have done so. Raises OSError."""
        self.rank, self.ranks = rank, len(handles)
        for other, (card, handle) in enumerate(zip(peers.cards, handles, strict=True)):
            self._maps.append(self._own if other == rank else _map(card.pid, handle, self._size))
        self._bytes = [_as_tensor(region) for region in self._maps]

    def payload(self, rank: int, half: int, length: int) -> Tensor:
        start = _PAYLOAD + half * self.capacity
        return self._bytes[rank][start : start + length]

    def announce(self, half: int, header: tuple[int, int, int]) -> None:
        _HEADER.pack_into(self._own, _HEADERS + half * _LINE, *header)

    def announced(self, rank: int, half: int) -> tuple[int, int, int]:
        return _HEADER.unpack_from(self._maps[rank], _HEADERS + half * _LINE)

    def set_word(self, word: int, value: int) -> None:
        self._atomics.word_store(self._address(self.rank, word), value)

    def word(self, rank: int, word: int) -> int:
        return self._atomics.word_load(self._address(rank, word))

    def wait_word(self, rank: int, word: int, value: int, seconds: float) -> bool:
        return self._atomics.word_reaches(self._address(rank, word), value, int(seconds * 1e6))

    def leave_note(self, text: str) -> None:
        data = text.encode(errors="replace")[:_NOTE_BYTES]
        self._own[_NOTE + _LENGTH.size : _NOTE + _LENGTH.size + len(data)] = data
        _LENGTH.pack_into(self._own, _NOTE, len(data))

    def note(self, rank: int) -> str:
        (length,) = _LENGTH.unpack_from(self._maps[rank], _NOTE)
        start = _NOTE + _LENGTH.size
        return self._maps[rank][start : start + min(length, _NOTE_BYTES)].decode(errors="replace")

    def close(self) -> None:
        # The maps go with the last tensor that looks at them.
        self._bytes, self._maps = [], []
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _address(self, rank: int, word: int) -> int:
        return self._bytes[rank].data_ptr() + word * _LINE


def _map(pid: int, handle: int, size: int) -> mmap.mmap:
    file = os.open(f"/proc/{pid}/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(file, size, prot=mmap.PROT_READ)
    finally:
        os.close(file)


def _as_tensor(region: mmap.mmap) -> Tensor:
    with warnings.catch_warnings():
        # torch has no tensors that can't be written; ours are only read where the memory is another rank's.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(region, dtype=torch.uint8)
