"""Collectives of GPU ranks of one host through memory that each of them can write.

Sums of up to SMALL_BYTES take one step: every rank sends all its values to all others, each value in one 8-byte word
with the mark of its generation, so that a word that has the mark has the value too. Larger ones take two: each rank
sends every other one its share of the columns, posts and waits, adds, sends the finished share to all, posts and waits.

Who may touch a place: each block of a kernel counts generations in device memory, so that a replayed graph counts on,
and boxes have two halves. In generation g a block writes into half g % 2 of the other ranks' boxes and waits for
something of generation g from each of them. A rank sends that only after all its kernels before, which read generation
g - 1, have ended; so when a block comes to write generation g + 2 into the half of g, nobody reads it any more. This
asks for one stream per rank. A reader empties a one-step word when it took it, so that no old mark is ever met again.

A wait ends by the value, or by the host (`watch.py`): then results are NaN, in all later calls too, and the next call,
`check` and the end of a `shared_fate` block raise what happened, by the rank's name.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.collectives import triton as launches
from samebits.collectives.device_memory import DeviceMemory
from samebits.collectives.process_group import ProcessGroupTransport
from samebits.collectives.watch import Watch

# Up to here a sum takes one step; the 8-byte words cost twice the bytes, the second step a round trip.
SMALL_BYTES = 1 << 20
_HALVES = _KINDS = 2


def region_bytes(ranks: int, capacity: int) -> int:
    """Bytes of a rank's region, for payloads of up to `capacity` bytes at a time.

    Raises ValueError for a capacity that the shares of so many ranks don't fill.
    """
    unit = 64 * ranks  # shares begin at multiples of 16 values, and none may be empty
    if capacity < unit * ranks or capacity % unit:
        raise ValueError(f"capacity of {ranks} ranks must be a multiple of {unit} and at least {unit * ranks}")
    return _offsets(ranks, capacity)[-1]


def _offsets(ranks: int, capacity: int) -> tuple[int, int, int]:
    """Where the small boxes and the large boxes begin, behind the flags, and where a region ends."""
    small = _KINDS * ranks * launches.LARGE_BLOCKS * 8
    large = small + _HALVES * ranks * _small_room(capacity) * 8
    return small, large, large + _KINDS * _HALVES * ranks * _large_room(ranks, capacity) * 4


def _small_room(capacity: int) -> int:
    return min(SMALL_BYTES, capacity) // 4


def _large_room(ranks: int, capacity: int) -> int:
    return capacity // 4 // ranks


class PeerMemoryTransport:
    """The collectives of one group over one DeviceMemory. All ranks make the same calls in the same order and sizes."""

    def __init__(self, group: dist.ProcessGroup, memory: DeviceMemory, watch: Watch, capacity: int) -> None:
        self._memory, self._watch = memory, watch
        self._host = ProcessGroupTransport(group)
        rank, ranks = group.rank(), group.size()
        device = memory.own.device
        tables = [
            torch.tensor([address + offset for address in memory.addresses], dtype=torch.int64, device=device)
            for offset in (0, *_offsets(ranks, capacity)[:2])
        ]
        self._region = launches.Region(
            rank=rank,
            ranks=ranks,
            flags=tables[0],
            small_boxes=tables[1],
            large_boxes=tables[2],
            small_state=torch.zeros(launches.SMALL_BLOCKS, 2, dtype=torch.int64, device=device),
            large_state=torch.zeros(launches.LARGE_BLOCKS, 2, dtype=torch.int64, device=device),
            watch=watch.words,
            small_room=_small_room(capacity),
            large_room=_large_room(ranks, capacity),
        )

    def gather(self, own: Tensor) -> Tensor:
        """uint8 [n] of every rank, in rank order: [ranks, n]. CPU tensors go through the group itself."""
        self._watch.check()
        if not own.is_cuda:
            return self._host.gather(own)
        ranks, length, room = self._region.ranks, own.numel(), 4 * self._region.large_room
        out = torch.empty(ranks, length, dtype=torch.uint8, device=own.device)
        for start in range(0, length, room):
            words = _as_words(own[start : start + room])
            if 4 * words.numel() == length:
                launches.gather_words(words, out.view(torch.int32), self._region)
                break
            came = words.new_empty(ranks, words.numel())
            launches.gather_words(words, came, self._region)
            out[:, start : start + room] = came.view(torch.uint8)[:, : length - start]
        return out

    def tree_sum(self, partial: Tensor) -> Tensor:
        """fp32 [n]: the balanced tree over ranks, on every rank."""
        self._watch.check()
        if not partial.is_cuda:
            return self._host.tree_sum(partial)
        return self._sum(partial, None, torch.float32)

    def tree_sum_bf16(self, partial: Tensor, bias: Tensor | None) -> Tensor:
        """fp32 [n], bias bf16 [c] that repeats over n: the tree sum plus bias, rounded once to bf16."""
        self._watch.check()
        if not partial.is_cuda:
            return self._host.tree_sum_bf16(partial, bias)
        return self._sum(partial, bias, torch.bfloat16)

    def tree_share(self, partial: Tensor) -> Tensor:
        """fp32 [ranks, n] on every rank -> [n]: row `rank` of the balanced tree over ranks."""
        self._watch.check()
        if not partial.is_cuda:
            return self._host.tree_share(partial)
        count, room = partial.shape[1], self._region.large_room
        out = torch.empty(count, dtype=torch.float32, device=partial.device)
        for start in range(0, count, room):
            piece = partial[:, start : start + room].contiguous()
            launches.sum_large(piece, None, out[start : start + room], self._region, whole=False)
        return out

    def check(self) -> None:
        """Raise what a wait on the device met, once the device got there (synchronize before)."""
        self._watch.check()

    def fail(self, error: BaseException) -> None:
        """Make every other rank raise RankFailed with this error instead of waiting for this rank."""
        self._watch.fail(error)

    def close(self) -> None:
        """Leave the group when the kernels of this rank have ended."""
        torch.cuda.synchronize(self._memory.own.device)
        self._watch.close()

    def _sum(self, partial: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        region, count = self._region, partial.numel()
        out = torch.empty(count, dtype=dtype, device=partial.device)
        start, rest = 0, out
        while start < count:
            if count - start <= region.small_room:
                if start:  # seldom: a view costs the host as much as a launch
                    partial, rest = partial[start:], out[start:]
                launches.sum_small(partial, bias, rest, region)
                break
            piece = slice(start, start + min(count - start, self._step(bias)))
            launches.sum_large(partial[piece], bias, out[piece], region, whole=True)
            start = piece.stop
        return out

    def _step(self, bias: Tensor | None) -> int:
        """Values of one call: whole rows of the bias, where there is one."""
        room, columns = self._region.large_room * self._region.ranks, 1 if bias is None else bias.numel()
        if columns > room:
            raise ValueError(f"peer_memory: rows of {columns} values do not fit {4 * room} bytes; raise the capacity")
        return room // columns * columns


def _as_words(payload: Tensor) -> Tensor:
    """uint8 [n] as int32, padded with zeros."""
    if payload.numel() % 4 == 0 and payload.data_ptr() % 4 == 0:
        return payload.view(torch.int32)
    padded = payload.new_zeros(-(-payload.numel() // 4) * 4)
    padded[: payload.numel()] = payload
    return padded.view(torch.int32)
