"""Where every token sits: which micro-batch, which rank, which row. Pure functions of the samples' lengths.

A step's active tokens (the response tokens) are numbered once, in order of sample and position: a token's number
is its slot. Every tensor that speaks about active tokens is indexed by slot, so nothing depends on how samples
were packed. The row of position p predicts the token at p + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from samebits.into_megatron.config import CpLayout
from samebits.ops.sample_support import Kept
from samebits.timeline.types import TrainSample


@dataclass(frozen=True)
class Packing:
    """How attention reads a packed micro-batch of R attention.

    Rows are this context-parallel rank's. `positions` int32 [T]; `queries` and `keys` are cumulative lengths
    int32 [samples + 1] of this rank's rows and of the rows of all ranks; `key_order` int64 [keys] puts gathered
    rows in order of sample and position (None when this rank has all rows itself).
    """

    positions: Tensor
    queries: Tensor
    keys: Tensor
    key_order: Tensor | None


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. `ids` [batch, sequence]; `rows` index the flattened [sequence * batch] hidden states.

    `rows`, `targets` and `slots` (all int64 [n]) speak about the active tokens of this rank, ascending in slot.
    `packing` is None for the padded layout, which Megatron's own attention needs. `segment` is the gradient segment
    of the batch that its samples belong to. `kept` are the ids that the sampler kept for these tokens (None: nothing
    was limited), `temperature` fp32 [n] their own ones (None: the trainer's).
    """

    ids: Tensor
    rows: Tensor
    targets: Tensor
    slots: Tensor
    packing: Packing | None
    segment: int = 0
    kept: Kept | None = None
    temperature: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch with all of its tensors on `device`."""
        moved: MicroBatch = _moved(self, device)
        return moved


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _moved(getattr(value, each.name), device) for each in fields(value)})
    return value


def first_slots(samples: Sequence[TrainSample]) -> list[int]:
    """Slot of each sample's first response token, and behind them the number of all active tokens."""
    slots = [0]
    for sample in samples:
        slots.append(slots[-1] + sample.response_length)
    return slots


def group_samples(samples: Sequence[TrainSample], max_tokens: int) -> list[range]:
    """Consecutive runs of samples with at most `max_tokens` tokens each; a longer sample is alone in its run."""
    groups, start, tokens = [], 0, 0
    for index, sample in enumerate(samples):
        length = len(sample.token_ids)
        if index > start and tokens + length > max_tokens:
            groups.append(range(start, index))
            start, tokens = index, 0
        tokens += length
    if samples:
        groups.append(range(start, len(samples)))
    return groups


def owned_runs(length: int, rank: int, ranks: int) -> list[range]:
    """Positions of one sample that a context-parallel rank holds: chunk `rank` and its mirror of 2 * ranks chunks.

    The sample counts as padded to a multiple of 2 * ranks; one rank holds everything, unpadded.
    """
    if ranks == 1:
        return [range(length)]
    chunk = -(-length // (2 * ranks))
    return [range(part * chunk, (part + 1) * chunk) for part in (rank, 2 * ranks - 1 - rank)]


def packed_batch(
    samples: Sequence[TrainSample],
    slots: Sequence[int],
    *,
    rank: int,
    ranks: int,
    multiple: int,
    each: int = 1,
    kind: CpLayout = "zigzag",
) -> MicroBatch:
    """Samples one behind the other on one row, this context-parallel rank's share of each.

    `slots` are the samples' first slots. A sample is padded with zeros to a multiple of `each` rows, over all ranks.
    Rows are padded to a multiple of `multiple` (sequence parallelism) by one more sample of zeros that nothing reads;
    there is at least one row. "zigzag" gives a rank two chunks of each sample, "allgather" an equal run of all packed
    rows.
    """
    if kind == "allgather" and ranks > 1:
        return _run_of_rows(_packed(samples, slots, 0, 1, multiple * ranks, each), rank, ranks)
    return _packed(samples, slots, rank, ranks, multiple, each)


def _packed(
    samples: Sequence[TrainSample], slots: Sequence[int], rank: int, ranks: int, multiple: int, each: int
) -> MicroBatch:
    ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    out_slots: list[int] = []
    lengths: list[int] = []
    for sample, slot in zip(samples, slots, strict=True):
        tokens, prompt, before = sample.token_ids, sample.prompt_length, len(ids)
        for run in owned_runs(len(tokens) + -len(tokens) % each, rank, ranks):
            first, last = max(run.start, prompt - 1), min(run.stop, len(tokens) - 1)
            if first < last:
                row = len(ids) + first - run.start
                rows += range(row, row + last - first)
                targets += tokens[first + 1 : last + 1]
                out_slots += range(slot + first + 1 - prompt, slot + last + 1 - prompt)
            held = tokens[run.start : run.stop]
            ids += held
            ids += [0] * (len(run) - len(held))
            positions += run
        lengths.append(len(ids) - before)
    padding = -len(ids) % multiple if ids else max(multiple, 2 if ranks > 1 else 1)
    if padding:
        ids += [0] * padding
        for run in owned_runs(padding * ranks, rank, ranks):
            positions += run
        lengths.append(padding)
    return MicroBatch(
        ids=torch.tensor([ids]),
        rows=torch.tensor(rows, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        slots=torch.tensor(out_slots, dtype=torch.int64),
        packing=Packing(
            positions=torch.tensor(positions, dtype=torch.int32),
            queries=_cumulative(lengths),
            keys=_cumulative([length * ranks for length in lengths]),
            key_order=_key_order(lengths, ranks),
        ),
    )


def _run_of_rows(whole: MicroBatch, rank: int, ranks: int) -> MicroBatch:
    """One of `ranks` equal runs of the rows of a packed micro-batch; queries of a sample may lie on several ranks."""
    packing = whole.packing
    assert packing is not None
    count = whole.ids.shape[1] // ranks
    start, end = rank * count, (rank + 1) * count
    mine = (whole.rows >= start) & (whole.rows < end)
    return MicroBatch(
        ids=whole.ids[:, start:end],
        rows=whole.rows[mine] - start,
        targets=whole.targets[mine],
        slots=whole.slots[mine],
        packing=Packing(
            positions=packing.positions[start:end],
            queries=packing.keys.clamp(start, end) - start,
            keys=packing.keys,
            key_order=torch.arange(count * ranks),
        ),
    )


def padded_batch(samples: Sequence[TrainSample], slots: Sequence[int], *, multiple: int) -> MicroBatch:
    """Samples side by side, padded on the right with token 0 to the longest (and to a multiple of `multiple`).

    Without samples there is one column of padding.
    """
    longest = max((len(sample.token_ids) for sample in samples), default=1)
    width = -(-longest // multiple) * multiple
    count = len(samples)
    rows: list[int] = []
    targets: list[int] = []
    out_slots: list[int] = []
    for column, (sample, slot) in enumerate(zip(samples, slots, strict=True)):
        first, last = sample.prompt_length - 1, len(sample.token_ids) - 1
        rows += [p * count + column for p in range(first, last)]
        targets += sample.token_ids[first + 1 : last + 1]
        out_slots += range(slot, slot + sample.response_length)
    return MicroBatch(
        ids=torch.tensor([[*s.token_ids, *([0] * (width - len(s.token_ids)))] for s in samples] or [[0] * width]),
        rows=torch.tensor(rows, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        slots=torch.tensor(out_slots, dtype=torch.int64),
        packing=None,
    )


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)


def _key_order(lengths: Sequence[int], ranks: int) -> Tensor | None:
    """Where, among the gathered rows of all ranks, the rows of each sample lie in order of position."""
    if ranks == 1:
        return None
    rows_per_rank = sum(lengths)
    order: list[int] = []
    start = 0
    for length in lengths:
        place = {
            position: rank * rows_per_rank + start + index
            for rank in range(ranks)
            for index, position in enumerate(p for run in owned_runs(length * ranks, rank, ranks) for p in run)
        }
        order += [place[position] for position in range(length * ranks)]
        start += length
    return torch.tensor(order, dtype=torch.int64)
