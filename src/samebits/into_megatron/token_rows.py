"""Which row of a micro-batch holds which token, in any layout.

The layout of a batch depends on the lengths of its samples alone. So the same batches are made once more of samples
whose token ids are numbers of tokens, and these are read where they came to lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samebits.into_megatron.batches import micro_batches
from samebits.into_megatron.config import TrainerConfig
from samebits.into_megatron.layout import MicroBatch
from samebits.timeline.types import TrainSample
from samebits.trace import Rows


@dataclass(frozen=True)
class Placed:
    """(row, number of the sample, index in it) of this rank's tokens, int64 [n, 3]; where each sample's keys lie.

    `key_rows` has, per sample, its number and the rows of its keys in order of position, among the rows that
    attention reads.
    """

    tokens: Tensor
    key_rows: tuple[tuple[int, Tensor], ...]

    def rows(self, traced: Mapping[int, int]) -> Rows:
        """The rows of traced samples, up to the index given for each."""
        keep = torch.zeros(len(self.tokens), dtype=torch.bool)
        for sample, end in traced.items():
            keep |= (self.tokens[:, 1] == sample) & (self.tokens[:, 2] <= end)
        columns = self.tokens[keep]
        return Rows(*(columns[:, at].contiguous() for at in range(3)))

    def keys(self, traced: Mapping[int, int]) -> Iterator[tuple[Tensor, Rows]]:
        """For each traced sample, where its keys lie and its rows."""
        for sample, lie in self.key_rows:
            if sample in traced:
                rows = self.rows({sample: traced[sample]})
                yield lie[: traced[sample] + 1], rows


def placements(samples: Sequence[TrainSample], config: TrainerConfig, dp_rank: int, cp_rank: int) -> list[Placed]:
    """One for each micro-batch that this rank makes of the samples, in their order."""
    lengths = torch.tensor([len(sample.token_ids) for sample in samples])
    ends = lengths.cumsum(0)
    numbered = [
        replace(sample, token_ids=tuple(range(int(end - length) + 1, int(end) + 1)))
        for sample, length, end in zip(samples, lengths, ends, strict=True)
    ]
    ranks = [micro_batches(numbered, config, dp_rank, rank) for rank in range(config.cp)]
    return [_placed([rank[index] for rank in ranks], cp_rank, ends, lengths) for index in range(len(ranks[cp_rank]))]


def _placed(parts: Sequence[MicroBatch], cp_rank: int, ends: Tensor, lengths: Tensor) -> Placed:
    tokens = [_tokens(part, ends, lengths) for part in parts]
    members = torch.cat([found[:, 1] for found in tokens]).unique().tolist()
    batch = parts[cp_rank]
    keys = []
    for place, number in enumerate(members):
        positions = torch.arange(int(lengths[number]))
        if batch.packing is not None:
            keys.append((number, positions + int(batch.packing.keys[place])))
        else:
            keys.append((number, positions * batch.ids.shape[0] + place))
    return Placed(tokens[cp_rank], tuple(keys))


def _tokens(batch: MicroBatch, ends: Tensor, lengths: Tensor) -> Tensor:
    """Rows count sequence first, batch second; 0 is padding."""
    flat = batch.ids.t().reshape(-1)
    rows = flat.nonzero()[:, 0]
    numbers = flat[rows] - 1
    sample = torch.searchsorted(ends, numbers, right=True)
    return torch.stack([rows, sample, numbers - (ends - lengths)[sample]], dim=1)
