"""Gradients of segments of the batch, and of data- and context-parallel ranks, added along one tree."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from samebits.collectives import fold_neighbours, gather_states
from samebits.into_megatron.gpt import ScoringModel
from samebits.into_megatron.layout import MicroBatch
from samebits.into_megatron.segments import SegmentSums
from samebits.ops.later import Later

_PIECE = 1 << 22  # elements that ranks exchange at a time
_FEW = 512  # columns of a norm whose weight's gradient waits: sums over its rows fill a small part of a card


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, wrapper: OrderedDataParallel, segment: int) -> Tensor:
        ctx.wrapper, ctx.segment = wrapper, segment
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # The first that a chunk's backward pass of a micro-batch does.
        ctx.wrapper.enter(ctx.segment)
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
        self._later = Later(self._gradients[0].device)
        if self._gradients[0].is_cuda:
            for parameter in chunk.parameters():
                if parameter.dim() == 1 and parameter.numel() <= _FEW:
                    self._later.serve(parameter.main_grad)

    def zero_grad_buffer(self) -> None:
        super().zero_grad_buffer()
        self._later.drop()
        if self._table is not None:
            self._table.zero_()
        self._sums.start(self._segments.start)

    def enter(self, segment: int) -> None:
        """What is added to the gradients from now on belongs to `segment`."""
        self._later.run()
        self._sums.enter(segment)

    def forward(self, batch: MicroBatch) -> Tensor:
        output: Tensor = super().forward(batch)
        if len(self._segments) == 1 or not output.requires_grad:
            return output
        return _Enter.apply(output, self, batch.segment)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Every rank of the group gets the tree sum of all ranks' gradients."""
        self._later.run()
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
