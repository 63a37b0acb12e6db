"""Gradients of data- and context-parallel ranks, added along a tree over neighbouring ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from samebits.collectives import fold_neighbours, gather_states
from samebits.into_megatron.gpt import ScoringModel

_PIECE = 1 << 22  # elements that ranks exchange at a time


class OrderedDataParallel(DistributedDataParallel):
    """Megatron's wrapper and gradient buffers; only the order in which ranks are added is ours.

    The group's ranks are numbered context first, then data, so that a data-parallel rank is a subtree.
    """

    def __init__(self, chunk: ScoringModel, first: bool) -> None:
        super().__init__(
            chunk.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
            chunk,
            disable_bucketing=not first,
        )

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Every rank of the group gets the tree sum of all ranks' gradients."""
        for buffer in self.buffers:
            add_ranks(buffer.grad_data, self.dp_cp_group)


def add_ranks(own: Tensor, group: dist.ProcessGroup) -> None:
    """Replace fp32 `own`, in place, by the tree sum over the group's ranks."""
    if group.size() == 1:
        return
    for piece in own.view(-1).split(_PIECE):
        piece.copy_(fold_neighbours(gather_states(piece, group).unbind(0)))


def finalize(chunks: list[torch.nn.Module], num_tokens: Tensor | None, **groups: Any) -> None:
    """Megatron's own finalisation. The losses are weighted already, so nothing is divided by a number of tokens."""
    finalize_model_grads(chunks, None, **groups)
