"""Gradients of the batch's segments, kept apart and added along a tree."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class SegmentSums:
    """Gradient buffers of one chunk, begun anew with every segment of the batch; segments add along a tree.

    Segments come in ascending order; one without samples may be left out, which adds nothing.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = buffers
        self._kept: list[tuple[int, int, list[Tensor]]] = []  # first segment, number of segments, their sum
        self._first = self._current = 0

    def start(self, first: int) -> None:
        """The buffers are zero; the first segment of this rank is `first`."""
        self._kept, self._first, self._current = [], first, first

    def enter(self, segment: int) -> None:
        """What is added to the buffers from now on belongs to `segment`."""
        if segment == self._current:
            return
        if segment < self._current:
            raise RuntimeError(f"gradient segment {segment} after {self._current}: micro-batches are out of order")
        self._kept.append((self._current, 1, [buffer.clone() for buffer in self._buffers]))
        self._fold(segment)
        for buffer in self._buffers:
            buffer.zero_()
        self._current = segment

    def finish(self, end: int) -> None:
        """Put the sum of all segments before `end`, the end of this rank's run, into the buffers."""
        if self._current == self._first and not self._kept:
            return
        self.enter(end)
        ((_, _, total),) = self._kept
        for buffer, part in zip(self._buffers, total, strict=True):
            buffer.copy_(part)
        self._kept = []

    def _fold(self, end: int) -> None:
        """Add every two halves of a block that ends by `end`."""
        while self._kept:
            start, size, parts = self._kept[-1]
            block = start - start % (2 * size)
            if block + 2 * size > end or block < self._first:
                return
            self._kept.pop()
            if self._kept and self._kept[-1][0] >= block:
                parts = [left + right for left, right in zip(self._kept.pop()[2], parts, strict=True)]
            self._kept.append((block, 2 * size, parts))
