"""Collectives over memory that the ranks share, by generation numbers.

Every collective is a row of rounds, and every round of a group has a number, its generation. In round g a rank

1. writes its payload and header into half g % 2 of its own region,
2. posts: stores g in its word POSTED,
3. waits until every rank has posted g,
4. reads the payloads of all ranks in half g % 2,
5. takes: stores g in its word TAKEN.

Who may touch a half: its owner writes it between the moment when all ranks have posted g - 1 and its own post of g;
from then on it belongs to the readers, until each of them has posted g + 1. A rank posts g + 1 only after it has read
everything of round g, so nobody overwrites what another still reads, and two halves are enough. Nobody writes into
another rank's region at all. TAKEN is for the end: memory must outlive its last reader.

A rank that meets an error says so in its word STATE, with a note. The others look there before each collective and,
while they wait, twenty times a second; they also notice a process that ended, one that left, and the time-out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from samebits.collectives.errors import CollectiveError, RankFailed, RankLate, RankLost, RanksDisagree
from samebits.collectives.fold import finish, fold_neighbours
from samebits.collectives.memory import ALIVE, CLOSED, FAILED, FOLLOWED, POSTED, STATE, TAKEN, PeerMemory
from samebits.collectives.peers import Peers

SLICE = 0.05
KINDS = ("gather", "tree sum", "tree share")
GATHER, TREE_SUM, TREE_SHARE = range(3)
# Up to here every rank reads every payload whole, in one round. Larger sums take two, each rank adding its share.
SMALL_BYTES = 32 * 1024


class PeerExchange:
    """The collectives of one group over one PeerMemory. All ranks call the same methods in the same order."""

    def __init__(self, memory: PeerMemory, peers: Peers, timeout: float) -> None:
        """`timeout` is how many seconds a rank waits for another one in a round."""
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        self.rank, self.ranks = memory.rank, memory.ranks
        self.timeout = timeout
        self._memory, self._peers = memory, peers
        self._generation = 0
        self._broken: CollectiveError | None = None

    def gather(self, own: Tensor) -> Tensor:
        """uint8 [n] of every rank, in rank order: [ranks, n]."""
        length, room = own.numel(), self._memory.capacity
        out = torch.empty((self.ranks, length), dtype=torch.uint8)
        for start in _starts(length, room):
            with self._round(GATHER, length, own[start : start + room]) as payloads:
                for row, payload in zip(out, payloads, strict=True):
                    row[start : start + room] = payload
        return out

    def tree_sum(self, partial: Tensor) -> Tensor:
        """fp32 -> fp32 of the same shape: the balanced tree over ranks, on every rank."""
        values, count, room = partial.view(-1), partial.numel(), self._memory.capacity // 4
        one_round = 4 * count <= SMALL_BYTES
        out = torch.empty(count, dtype=torch.float32)
        for start in _starts(count, room):
            piece = values[start : start + room]
            into = out[start : start + room]
            if one_round:
                with self._round(TREE_SUM, 4 * count, _bytes_of(piece)) as payloads:
                    into.copy_(fold_neighbours([p.view(torch.float32) for p in payloads]))
            else:
                self._sum_in_shares(piece, into, 4 * count)
        return out.view(partial.shape)

    def tree_sum_bf16(self, partial: Tensor, bias: Tensor | None) -> Tensor:
        """fp32 [..., c], bias bf16 [c] -> bf16 of that shape: the tree sum plus bias, rounded once."""
        return finish(self.tree_sum(partial), bias, torch.bfloat16)

    def _sum_in_shares(self, piece: Tensor, into: Tensor, total: int) -> None:
        share = -(-piece.numel() // self.ranks)
        mine = slice(self.rank * share, (self.rank + 1) * share)
        with self._round(TREE_SUM, total, _bytes_of(piece)) as payloads:
            folded = fold_neighbours([p.view(torch.float32)[mine] for p in payloads])
        padded = folded.new_zeros(share)
        padded[: folded.numel()] = folded
        with self._round(TREE_SUM, total, _bytes_of(padded)) as payloads:
            for rank, payload in enumerate(payloads):
                part = into[rank * share : (rank + 1) * share]
                part.copy_(payload.view(torch.float32)[: part.numel()])

    def tree_share(self, partial: Tensor) -> Tensor:
        """fp32 [ranks, n] on every rank -> [n]: row `rank` of the balanced tree over ranks."""
        count, room = partial.shape[1], self._memory.capacity // (4 * self.ranks)
        out = torch.empty(count, dtype=torch.float32)
        for start in _starts(count, room):
            piece = partial[:, start : start + room].contiguous()
            with self._round(TREE_SHARE, 4 * count, _bytes_of(piece)) as payloads:
                rows = [p.view(torch.float32).view(self.ranks, piece.shape[1])[self.rank] for p in payloads]
                out[start : start + room] = fold_neighbours(rows)
        return out

    def check(self) -> None:
        """Nothing: what goes wrong is raised by the call itself."""

    def fail(self, error: BaseException) -> None:
        """Make every other rank raise RankFailed with this error instead of waiting for this rank."""
        if self._broken is not None:
            return
        self._give_up(FAILED, f"{type(error).__name__}: {error}")
        self._broken = RankFailed(f"this rank met an error before: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Leave the group once the others have read this rank's last payload, or can't any more."""
        end = time.monotonic() + self.timeout
        for rank in self._others():
            while not self._memory.wait_word(rank, TAKEN, self._generation, SLICE):
                if self._memory.word(rank, STATE) != ALIVE or self._peers.ended(rank) or time.monotonic() > end:
                    break
        self._give_up(CLOSED, "")
        self._memory.close()
        self._peers.close()
        self._broken = RankLost("this rank has left the group; attach it again")

    @contextmanager
    def _round(self, kind: int, total: int, payload: Tensor) -> Iterator[list[Tensor]]:
        """One round: the payloads of all ranks, which may be read until the block ends."""
        if self._broken is not None:
            raise self._broken
        generation, memory = self._generation + 1, self._memory
        half = self._half(generation)
        try:
            self._look_around(generation, kind)
            memory.payload(self.rank, half, payload.numel()).copy_(payload)
            memory.announce(half, (kind, total, generation))
            memory.set_word(POSTED, generation)
            self._await_posts(generation, kind)
            self._check_headers(half, generation)
            yield [memory.payload(rank, half, payload.numel()) for rank in range(self.ranks)]
            memory.set_word(TAKEN, generation)
        except CollectiveError:
            raise
        except BaseException as error:
            # The next call would meet the others in this round, and take what they said here for an answer to it.
            self.fail(error)
            raise
        self._generation = generation

    def _half(self, generation: int) -> int:
        return generation % 2

    def _await_posts(self, generation: int, kind: int) -> None:
        end = time.monotonic() + self.timeout
        for rank in self._others():
            while not self._memory.wait_word(rank, POSTED, generation, SLICE):
                self._look_around(generation, kind)
                if time.monotonic() > end:
                    self._raise_late(generation, kind)

    def _look_around(self, generation: int, kind: int) -> None:
        """Raise if a rank that this round still needs can't come."""
        states = {rank: self._memory.word(rank, STATE) for rank in self._others()}
        where = f"collective round {generation} ({KINDS[kind]})"
        # The rank whose error it was first: the others only followed.
        for state, said in ((FAILED, "failed before"), (FOLLOWED, "gave up at")):
            for rank in (r for r, found in states.items() if found == state):
                text = f"{self._peers.name(rank)} {said} {where}: {self._memory.note(rank)}"
                self._raise(RankFailed(text))
        for rank, state in states.items():
            # What a rank posted before it ended can still be read.
            ended = state == CLOSED or self._peers.ended(rank)
            if ended and self._memory.word(rank, POSTED) < generation:
                how = "left the group" if state == CLOSED else "ended"
                self._raise(RankLost(f"{self._peers.name(rank)} {how} before {where}"))

    def _raise_late(self, generation: int, kind: int) -> None:
        here = [r for r in range(self.ranks) if r == self.rank or self._memory.word(r, POSTED) >= generation]
        late = ", ".join(self._peers.name(rank) for rank in range(self.ranks) if rank not in here)
        came = ", ".join(str(self._peers.numbers[rank]) for rank in here)
        text = f"{late} did not reach collective round {generation} ({KINDS[kind]}) within {self.timeout:g} s"
        self._raise(RankLate(f"{text}; ranks that did: {came}"))

    def _check_headers(self, half: int, generation: int) -> None:
        headers = [self._memory.announced(rank, half) for rank in range(self.ranks)]
        if len(set(headers)) != 1:
            calls = "; ".join(
                f"rank {self._peers.numbers[rank]} calls {KINDS[kind]} of {total} bytes in its round {number}"
                for rank, (kind, total, number) in enumerate(headers)
            )
            self._raise(RanksDisagree(f"collective round {generation}: {calls}; all ranks must make the same calls"))

    def _raise(self, error: CollectiveError) -> None:
        self._broken = error
        self._give_up(FOLLOWED, str(error))
        raise error

    def _give_up(self, state: int, note: str) -> None:
        if self._memory.word(self.rank, STATE) == ALIVE:
            self._memory.leave_note(note)
            self._memory.set_word(STATE, state)

    def _others(self) -> Sequence[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank]


def _starts(count: int, room: int) -> range:
    """Where the pieces begin; an empty payload is one empty piece, so that its ranks meet too."""
    return range(0, max(count, 1), room)


def _bytes_of(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)
