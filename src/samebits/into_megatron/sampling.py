"""How a sample's tokens were drawn: checked before anything is scored by it, then shared out to micro-batches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samebits.into_megatron.layout import MicroBatch
from samebits.ops.sample_support import Kept
from samebits.timeline.types import TrainSample


def check_sampling(sample: TrainSample, vocab: int, *, native: bool) -> None:
    """Raise ValueError for a support without its token, an id beyond the vocabulary, a temperature that is no divisor,
    and for any support on the native route, which renormalises over nothing."""
    name = f"sample {sample.key}"
    if sample.temperature is not None and not 0 < sample.temperature < float("inf"):
        raise ValueError(
            f"{name}: temperature {sample.temperature}; want a positive one (a greedy token is scored at 1, as the "
            "rollout engine does, and teaches nothing about the distribution that it came from)"
        )
    support = sample.support
    if support is None:
        return
    if native:
        raise ValueError(
            f"{name}: it was drawn from a support, but Megatron-Core's own log-probability does not renormalise; "
            "set the case of logp to R"
        )
    problem = support.problem(sample.token_ids[sample.prompt_length :])
    if not problem and max(support.ids, default=0) >= vocab:
        problem = f"its support names id {max(support.ids)}, the vocabulary is [0, {vocab})"
    if problem:
        raise ValueError(f"{name}: {problem}")


@dataclass(frozen=True)
class Sampling:
    """How the active tokens of a step were drawn, by slot: what was kept, and at which temperature, fp32 [slots]."""

    kept: Kept | None
    temperature: Tensor | None

    @classmethod
    def of(cls, samples: Sequence[TrainSample], temperature: float) -> Sampling:
        """Both are None where they say nothing: no support, no temperature but `temperature`."""
        kept, each = None, None
        if any(sample.support is not None for sample in samples):
            counts, ids = array("i"), array("i")
            for sample in samples:
                counts += sample.support.counts if sample.support else array("i", [0] * sample.response_length)
                ids += sample.support.ids if sample.support else array("i")
            kept = Kept(torch.tensor(counts, dtype=torch.int64), torch.tensor(ids, dtype=torch.int64))
        if any(sample.temperature is not None for sample in samples):
            own = [temperature if sample.temperature is None else sample.temperature for sample in samples]
            lengths = torch.tensor([sample.response_length for sample in samples])
            each = torch.repeat_interleave(torch.tensor(own, dtype=torch.float32), lengths)
        return cls(kept, each)

    def put_into(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch with its tokens' share."""
        kept = None if self.kept is None else self.kept.select(batch.slots)
        each = None if self.temperature is None else self.temperature[batch.slots]
        return replace(batch, kept=kept, temperature=each)
