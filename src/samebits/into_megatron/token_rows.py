"""Which row of a micro-batch holds which token: made from the lengths of the samples alone, not from the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.into_megatron.layout import MicroBatch, owned_runs
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


def placed(batch: MicroBatch, samples: Sequence[TrainSample], numbers: Sequence[int], rank: int, ranks: int) -> Placed:
    """Where the tokens of `samples`, which have these numbers, lie in the batch made of them."""
    if batch.packing is None:
        return _padded(samples, numbers)
    tokens, keys = [], []
    row = first_key = 0
    for sample, number in zip(samples, numbers, strict=True):
        length = len(sample.token_ids)
        for run in owned_runs(length, rank, ranks):
            tokens += [(row + position - run.start, number, position) for position in run if position < length]
            row += len(run)
        keys.append((number, torch.arange(first_key, first_key + length)))
        first_key += sum(len(run) for part in range(ranks) for run in owned_runs(length, part, ranks))
    return Placed(torch.tensor(tokens), tuple(keys))


def _padded(samples: Sequence[TrainSample], numbers: Sequence[int]) -> Placed:
    count = len(samples)
    tokens = [
        (position * count + column, number, position)
        for column, (sample, number) in enumerate(zip(samples, numbers, strict=True))
        for position in range(len(sample.token_ids))
    ]
    keys = [
        (number, torch.arange(len(sample.token_ids)) * count + column)
        for column, (sample, number) in enumerate(zip(samples, numbers, strict=True))
    ]
    return Placed(torch.tensor(tokens), tuple(keys))
