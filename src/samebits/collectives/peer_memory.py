"""Collectives of GPU ranks of one host through memory that each of them can write.

Sums of up to SMALL_BYTES take one step: every rank sends all its values to all others, each value in one 8-byte word
with the mark of its generation, so that a word that has the mark has the value too. Larger ones take two: each rank
sends every other one its share of the columns, posts and waits, adds, sends the finished share to all, posts and waits.
Two ranks spare the second step up to DIRECT_BYTES: each sends all its values and adds all.

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

# Up to here a sum takes one step of 8-byte words, which cost twice the bytes and save a round trip. These two were
# measured between two ranks (`benchmarks/gpu_collectives.py`).
SMALL_BYTES = 512 << 10
# Up to here two ranks send all values: as many bytes as shares and their fp32 sums, a third more than with bf16 sums.
DIRECT_BYTES = 2 << 20
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
        ranks, device = group.size(), memory.own.device
        starts = (0, *_offsets(ranks, capacity)[:2])
        tables = torch.tensor(
            [[own + start for own in memory.addresses] for start in starts], dtype=torch.int64, device=device
        )
        self._region = launches.Region(
            group.rank(), ranks, launches.Addresses(*tables), watch.words, _small_room(capacity),
            _large_room(ranks, capacity),
        )  # fmt: skip
        self._direct_room = min(DIRECT_BYTES // 4, self._region.large_room) if ranks == 2 else 0

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
        """fp32 -> fp32 of the same shape: the balanced tree over ranks, on every rank."""
        self._watch.check()
        if not partial.is_cuda:
            return self._host.tree_sum(partial)
        return self._sum(partial, None, torch.float32)

    def tree_sum_bf16(self, partial: Tensor, bias: Tensor | None) -> Tensor:
        """fp32 [..., c], bias bf16 [c] -> bf16 of that shape: the tree sum plus bias, rounded once."""
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
            launches.sum_large(piece, None, out[start : start + room], self._region, "own share")
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
        out = torch.empty_like(partial, dtype=dtype)
        count = partial.numel()
        if count <= self._pieces(bias):
            self._launch(partial, bias, out, count)
        else:
            values, sums = partial.view(-1), out.view(-1)
            for start in range(0, count, self._pieces(bias)):
                piece = slice(start, start + self._pieces(bias))
                self._launch(values[piece], bias, sums[piece], sums[piece].numel())
        return out

    def _launch(self, partial: Tensor, bias: Tensor | None, out: Tensor, count: int) -> None:
        region = self._region
        if count <= region.small_room:
            if count:
                launches.sum_small(partial, bias, out, region)
        elif count <= self._direct_room:
            launches.sum_large(partial, bias, out, region, "direct")
        else:
            launches.sum_large(partial, bias, out, region, "shares")

    def _pieces(self, bias: Tensor | None) -> int:
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
