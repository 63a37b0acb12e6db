"""Recording points while a model runs: digests of the traced tokens' rows, and whole rows where they are asked for.

The ops write into buffers of the device; the host says before a pass which rows are traced (`place`) and reads the
buffers after it (`collect`). With a fixed `capacity` every address and size stays the same from pass to pass, so
`note` may be captured in a graph and its buffers read after each replay.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samebits.bits import raw
from samebits.trace.digest import prefix_digests, row_digests
from samebits.trace.points import ASKED, Point


@dataclass(frozen=True)
class Rows:
    """Which row of a batch holds which token. All int64 [n]: row, number of the sequence, index in the sequence."""

    row: Tensor
    sequence: Tensor
    index: Tensor

    def __len__(self) -> int:
        return int(self.row.shape[0])


@dataclass(frozen=True)
class Entry:
    """What one process recorded at one point in one pass: plain data that crosses processes.

    The columns are `start` .. of `whole`. `sequence` and `index` int64 [n], `digests` int64 [n], `bits` the raw
    elements [n, width] as integers, or None where only digests were wanted.
    """

    point: tuple[int, str]
    dtype: str
    start: int
    whole: int
    sequence: np.ndarray[Any, Any]
    index: np.ndarray[Any, Any]
    digests: np.ndarray[Any, Any]
    bits: np.ndarray[Any, Any] | None


ANY = -1  # a buffer that holds rows of any sequence
_Key = tuple[Point, int, int]  # point, first column, sequence


@dataclass
class _Buffer:
    kind: str
    rows: Rows
    dtype: torch.dtype
    start: int
    whole: int
    digests: Tensor
    kept: Tensor | None


class Recorder:
    """Records the points of one process. `keep` names the points whose rows are wanted whole."""

    def __init__(self, keep: Collection[Point] = (), capacity: int | None = None, device: str = "cpu") -> None:
        self.keep = frozenset(keep) | frozenset(ASKED)
        self.capacity = capacity
        self.device = device
        self.entries: list[Entry] = []
        self._buffers: dict[_Key, _Buffer] = {}
        self._selections: dict[str, Tensor] = {}
        self._rows: dict[str, Rows] = {}

    def place(self, rows: Rows, kind: str = "tokens") -> None:
        """Says which rows of the coming pass are traced. `kind` names the axis that the row numbers count.

        Raises ValueError when they are more than the fixed capacity.
        """
        if self.capacity is None:
            self._selections[kind] = rows.row
        else:
            if len(rows) > self.capacity:
                raise ValueError(f"trace: {len(rows)} rows are traced in one pass, the capacity is {self.capacity}")
            if kind not in self._selections:
                self._selections[kind] = torch.zeros(self.capacity, dtype=torch.int64, device=self.device)
            self._selections[kind][: len(rows)].copy_(rows.row)
            self._selections[kind][len(rows) :].zero_()  # rows of an earlier pass may be beyond this one's
        self._rows[kind] = rows

    def rows(self, kind: str = "tokens") -> Rows:
        """The traced rows of the coming pass."""
        return self._rows[kind]

    def traces(self, kind: str = "tokens") -> bool:
        """Whether any row of the coming pass is traced."""
        return kind in self._rows and len(self._rows[kind]) > 0

    def note(self, point: Point, x: Tensor, *, start: int = 0, whole: int | None = None, kind: str = "tokens") -> None:
        """Records the traced rows of x [rows, ...]; `start` and `whole` place its columns in the whole row."""
        if not self.traces(kind):
            return
        matrix = x.detach().reshape(x.shape[0], -1)
        picked = matrix.index_select(0, self._selections[kind].to(x.device))
        whole = matrix.shape[1] if whole is None else whole
        kept = picked if point in self.keep else None
        buffer = _Buffer(kind, self._rows[kind], x.dtype, start, whole, row_digests(picked, start), kept)
        self._write((point, start, ANY), buffer)

    def note_prefixes(
        self, layer: int, name: str, held: Tensor, rows: Rows, *, start: int = 0, whole: int | None = None
    ) -> None:
        """Records, for each of `rows` of one sequence, the digest of held[: index + 1], held [length, width].

        Where the point is kept, the rows of `held` itself become the point `name` + "_rows", by index. The number of
        rows differs from pass to pass: call it between passes, not while a graph is captured.
        """
        whole = held.shape[1] if whole is None else whole
        own = row_digests(held, start)
        sequence = int(rows.sequence[0])
        every = torch.arange(held.shape[0])
        noted: list[tuple[str, Tensor, Rows, Tensor | None]] = [(name, prefix_digests(own)[rows.index], rows, None)]
        if Point(layer, name) in self.keep:
            noted.append((f"{name}_rows", own, Rows(every, torch.full_like(every, sequence), every), held.clone()))
        for label, digests, places, kept in noted:
            key = (Point(layer, label), start, sequence)
            self._buffers[key] = _Buffer("tokens", places, held.dtype, start, whole, digests, kept)

    def _write(self, key: _Key, buffer: _Buffer) -> None:
        """Into the buffer that an earlier pass left, where there is one of this size: its address must not change."""
        found = self._buffers.get(key)
        if found is None or found.digests.shape != buffer.digests.shape:
            self._buffers[key] = buffer
            return
        found.rows = buffer.rows
        found.digests.copy_(buffer.digests)
        if found.kept is not None and buffer.kept is not None:
            found.kept.copy_(buffer.kept)

    def collect(self) -> None:
        """Moves what the last pass wrote to the host. Call it once after each pass."""
        for (point, _, sequence), found in self._buffers.items():
            rows = found.rows
            if sequence == ANY and self.capacity is not None:
                rows = self._rows[found.kind]  # a replayed graph does not run `note`
            count = len(rows)
            bits = None if found.kept is None else _integers(found.kept[:count])
            self.entries.append(
                Entry(
                    point=(point.layer, point.name),
                    dtype=str(found.dtype).removeprefix("torch."),
                    start=found.start,
                    whole=found.whole,
                    sequence=rows.sequence.cpu().numpy().copy(),
                    index=rows.index.cpu().numpy().copy(),
                    digests=found.digests[:count].cpu().numpy().copy(),
                    bits=bits,
                )
            )
        if self.capacity is None:
            self._buffers.clear()

    def take(self) -> list[Entry]:
        """What was collected since the last call."""
        taken, self.entries = self.entries, []
        return taken


def _integers(x: Tensor) -> np.ndarray[Any, Any]:
    return raw(x).cpu().numpy().copy()
