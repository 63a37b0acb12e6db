"""What a step reports about its active tokens: collected from the ranks that scored them, then summarised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.collectives import gather_states
from samebits.into_megatron import layout
from samebits.timeline.types import SampleKey, TrainSample


class TokenTable:
    """Values of every active token of a batch, by slot: this rank fills in what it scores."""

    def __init__(self, samples: Sequence[TrainSample], columns: int, device: torch.device) -> None:
        slots = layout.first_slots(samples)[-1]
        self._values = torch.zeros(slots, columns, dtype=torch.float32, device=device)
        self._filled = torch.zeros(slots, dtype=torch.uint8, device=device)

    def fill(self, slots: Tensor, values: Tensor) -> None:
        """fp32 [n, columns] of the tokens in `slots`."""
        self._values[slots] = values.detach()
        self._filled[slots] += 1

    def collect(self, rows: dist.ProcessGroup, stages: dist.ProcessGroup) -> Tensor:
        """fp32 [slots, columns] of all tokens, on the CPU of every rank: copies, never sums.

        `rows` are the context- and data-parallel ranks among which every token is scored once, `stages` the pipeline
        whose last rank scores. Raises RuntimeError naming the first token that was scored never or more than once.
        """
        times = gather_states(self._filled.cpu(), rows)
        values = gather_states(self._values.cpu(), rows)[times.argmax(0), torch.arange(len(self._filled))]
        count, values = gather_states(times.sum(0), stages)[-1], gather_states(values, stages)[-1]
        wrong = (count != 1).nonzero()
        if len(wrong):
            slot = int(wrong[0])
            raise RuntimeError(
                f"active token {slot} was scored {int(count[slot])} times, want once: "
                "a micro-batch was lost or repeated"
            )
        return values


def bits_by_sample(samples: Sequence[TrainSample], logp: Tensor) -> dict[SampleKey, tuple[int, ...]]:
    """The bit patterns of fp32 log-probabilities [slots], sample by sample."""
    patterns = logp.contiguous().view(torch.uint32).tolist()
    slots = layout.first_slots(samples)
    return {
        sample.key: tuple(patterns[start:end])
        for sample, start, end in zip(samples, slots[:-1], slots[1:], strict=True)
    }
