"""Which request each row of vLLM's batch belongs to, however the scheduler moves, preempts and resumes requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Kept = TypeVar("Kept")


class BatchRows(LogitsProcessor, Generic[Kept]):
    """Row of the batch -> what is kept of its request; logits are left alone.

    vLLM's batch updates bring every request's parameters and the live list of the tokens that it has produced.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: list[Kept | None] = [None] * vllm_config.scheduler_config.max_num_seqs

    def keep(self, params: SamplingParams, tokens: list[int]) -> Kept:
        """What to keep of a request."""
        raise NotImplementedError

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.rows[row] = None
        for row, params, _, tokens in batch_update.added:
            self.rows[row] = self.keep(params, tokens)
        for source, target, direction in batch_update.moved:
            swapped = self.rows[target] if direction == MoveDirectionality.SWAP else None
            self.rows[source], self.rows[target] = swapped, self.rows[source]
