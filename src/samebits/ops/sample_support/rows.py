"""What limits the ids of a row, and which ids are left."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

NO_DISTRIBUTION = -1  # the count of a row with NaN or +inf, or nothing finite


@dataclass(frozen=True)
class Limits:
    """Per row: top_k int64 [T] (0: any number), top_p fp32 [T] (1: all), min_p fp32 [T] (0: none)."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, rows: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Limits:
        """The same limits for every row."""
        return cls(torch.full((rows,), top_k), *(torch.full((rows,), p, dtype=torch.float32) for p in (top_p, min_p)))

    def check(self, rows: int) -> None:
        """Raises ValueError for another shape or dtype, and for a value outside its range."""
        for name, dtype in (("top_k", torch.int64), ("top_p", torch.float32), ("min_p", torch.float32)):
            value = getattr(self, name)
            if value.dtype != dtype or value.shape != (rows,) or not value.is_contiguous():
                raise ValueError(f"sample_support: {name} must be contiguous {dtype} [{rows}], got {value.dtype} "
                                 f"{list(value.shape)}")  # fmt: skip
        for name, good, wanted in (
            ("top_k", self.top_k >= 0, "0 (no limit) or more"),
            ("top_p", (self.top_p > 0) & (self.top_p <= 1), "in (0, 1]"),
            ("min_p", (self.min_p >= 0) & (self.min_p <= 1), "in [0, 1]"),
        ):
            if not bool(good.all()):
                row = int((~good).nonzero()[0])
                raise ValueError(
                    f"sample_support: {name} must be {wanted}, got {getattr(self, name)[row]} in row {row}"
                )

    def any(self) -> Tensor:
        """bool [T]: the rows that something limits."""
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)


@dataclass(frozen=True)
class Kept:
    """The ids that a sampler kept: row r has the next counts[r] of `ids`, ascending; a row of count 0 keeps all.

    counts int64 [T], ids int64 [sum of counts], on one device.
    """

    counts: Tensor
    ids: Tensor

    @classmethod
    def all(cls, rows: int) -> Kept:
        """Rows that nothing limits."""
        return cls(torch.zeros(rows, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))

    @classmethod
    def of(cls, rows: list[list[int]]) -> Kept:
        """From one list of ids per row, in any order; an empty list keeps all."""
        flat = [i for row in rows for i in sorted(row)]
        return cls(torch.tensor([len(row) for row in rows], dtype=torch.int64), torch.tensor(flat, dtype=torch.int64))

    @cached_property
    def offsets(self) -> Tensor:
        """int64 [T + 1]: where each row's ids start, and behind them their number."""
        return torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)])

    def to(self, device: torch.device) -> Kept:
        """The same on a device."""
        return Kept(self.counts.to(device), self.ids.to(device))

    @property
    def limited(self) -> Tensor:
        """bool [T]: the rows that do not keep all."""
        return self.counts > 0

    def row(self, r: int) -> Tensor:
        """The ids of one row."""
        return self.ids[int(self.offsets[r]) : int(self.offsets[r + 1])]

    def select(self, rows: Tensor) -> Kept:
        """Some rows, int64 [n], in the given order."""
        return Kept(self.counts[rows], self.ids[self._places(rows)])

    def owners(self) -> Tensor:
        """int64 [ids]: the row of each id."""
        return torch.repeat_interleave(self.counts)

    def inside(self, start: int, stop: int) -> Kept:
        """What lies in [start, stop), counted from start. A row may be left with no id, which does not mean all."""
        here = (self.ids >= start) & (self.ids < stop)
        counts = torch.bincount(self.owners()[here], minlength=len(self.counts))
        return Kept(counts, self.ids[here] - start)

    def check(self, rows: int) -> None:
        """Raises ValueError unless this describes `rows` rows, each of ids that ascend from 0 or more."""
        for name in ("counts", "ids"):
            value = getattr(self, name)
            if value.dtype != torch.int64 or value.ndim != 1 or not value.is_contiguous():
                raise ValueError(f"kept: {name} must be contiguous int64 with one axis, got {value.dtype} "
                                 f"{list(value.shape)}")  # fmt: skip
        if len(self.counts) != rows or bool((self.counts < 0).any()) or int(self.offsets[-1]) != len(self.ids):
            raise ValueError(
                f"kept: {len(self.counts)} counts that add up to {int(self.offsets[-1])} for {rows} rows and "
                f"{len(self.ids)} ids"
            )
        owners = self.owners()
        torn = (owners[1:] == owners[:-1]) & (self.ids[1:] <= self.ids[:-1])
        if bool(torn.any()) or bool((self.ids < 0).any()):
            raise ValueError("kept: the ids of a row must ascend from 0 or more, each once")

    def _places(self, rows: Tensor) -> Tensor:
        counts = self.counts[rows]
        first = torch.repeat_interleave(self.offsets[rows], counts)
        begin = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        return first + torch.arange(len(first), device=first.device) - begin
