"""Forward and backward over micro-batches by Megatron's own pipeline schedules: none, 1F1B, or interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from samebits.into_megatron.layout import MicroBatch

# What the last stage does with a micro-batch's log-probabilities [n]: the loss of each of them, fp32 [n].
Loss = Callable[[MicroBatch, Tensor], Tensor]


class _Sum(torch.autograd.Function):
    """A scalar that stands for the sum of `losses` times `scale`: its value is not used, its gradient is."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, scale: float) -> Tensor:
        ctx.shape, ctx.scale = losses.shape, scale
        return losses.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].new_full(ctx.shape, ctx.scale), None


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    loss: Loss,
    *,
    scale: float = 0.0,
    forward_only: bool = False,
) -> float:
    """All micro-batches through this rank's chunks; the seconds that its forward passes took.

    `loss` is called on the last pipeline stage, once for each micro-batch. Each of its losses is differentiated
    with the weight `scale`. Megatron's `finalize_model_grads_func` runs at the end, unless `forward_only`.
    """
    seconds = 0.0

    def forward_step(iterator: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[Tensor, Any]:
        nonlocal seconds
        started = time.perf_counter()
        batch = next(iterator)
        output = chunk(batch)
        seconds += time.perf_counter() - started

        def finish(logp: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            nonlocal seconds
            begun = time.perf_counter()
            losses = loss(batch, logp)
            seconds += time.perf_counter() - begun
            return _Sum.apply(losses, scale), torch.tensor(0, dtype=torch.int), {}

        return output, finish

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=1,  # not used: every micro-batch tells its own
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return seconds
