"""Gradients of segments of the batch, and of data- and context-parallel ranks, added along one tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from samebits.collectives import fold_neighbours, gather_states
from samebits.into_megatron.gpt import ScoringModel
from samebits.into_megatron.layout import MicroBatch

_PIECE = 1 << 22  # elements that ranks exchange at a time


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


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, sums: SegmentSums, segment: int) -> Tensor:
        ctx.sums, ctx.segment = sums, segment
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # The first that a chunk's backward pass of a micro-batch does.
        ctx.sums.enter(ctx.segment)
        return grads[0], None, None


class OrderedDataParallel(DistributedDataParallel):
    """Megatron's wrapper and gradient buffers; only the order in which segments and ranks are added is ours.

    `segments` are this rank's, `table` a second gradient of the embedding's weight that is added to it at the end.
    The group's ranks are numbered context first, then data, so that a data-parallel rank is a subtree.
    """

    def __init__(self, chunk: ScoringModel, first: bool, segments: range, table: Tensor | None = None) -> None:
        super().__init__(
            chunk.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
            chunk,
            disable_bucketing=not first,
        )
        self._segments, self._table = segments, table
        self._gradients = [buffer.grad_data for buffer in self.buffers] + ([] if table is None else [table])
        self._sums = SegmentSums(self._gradients)

    def zero_grad_buffer(self) -> None:
        super().zero_grad_buffer()
        if self._table is not None:
            self._table.zero_()
        self._sums.start(self._segments.start)

    def forward(self, batch: MicroBatch) -> Tensor:
        output: Tensor = super().forward(batch)
        if len(self._segments) == 1 or not output.requires_grad:
            return output
        return _Enter.apply(output, self._sums, batch.segment)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Every rank of the group gets the tree sum of all ranks' gradients."""
        self._sums.finish(self._segments.stop)
        for gradient in self._gradients:
            add_ranks(gradient, self.dp_cp_group)
        if self._table is not None:
            self.module.embedding.word_embeddings.weight.main_grad += self._table


def add_ranks(own: Tensor, group: dist.ProcessGroup) -> None:
    """Replace fp32 `own`, in place, by the tree sum over the group's ranks."""
    if group.size() == 1:
        return
    for piece in own.view(-1).split(_PIECE):
        piece.copy_(fold_neighbours(gather_states(piece, group).unbind(0)))


def finalize(chunks: list[torch.nn.Module], num_tokens: Tensor | None, **groups: Any) -> None:
    """Megatron's own finalisation. The losses are weighted already, so nothing is divided by a number of tokens."""
    finalize_model_grads(chunks, None, **groups)
