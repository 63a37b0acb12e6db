"""Every active token has one row on one rank, whatever the packing; checked for all small cases."""

from __future__ import annotations

import itertools

import pytest
import torch

from samebits.into_megatron.config import CpLayout
from samebits.into_megatron.layout import (
    MicroBatch,
    first_slots,
    group_samples,
    owned_runs,
    packed_batch,
    padded_batch,
)
from samebits.timeline.types import SampleKey, TrainSample


def sample(index: int, prompt: int, response: int) -> TrainSample:
    length = prompt + response
    ids = tuple(1000 * (index + 1) + p for p in range(length))
    return TrainSample(SampleKey(0, index, 0), ids, prompt, 1.0, (0,) * response)


SETS = [
    [sample(0, 1, 1)],
    [sample(0, 3, 8)],
    [sample(0, 1, 4), sample(1, 5, 2), sample(2, 2, 7)],
    [sample(i, 1 + i % 3, 1 + i % 5) for i in range(9)],
]


def scored(batch: MicroBatch) -> dict[int, tuple[int, int]]:
    """slot -> (token of the row that predicts it, the target)."""
    flat = batch.ids.t().reshape(-1)
    return {
        slot: (int(flat[row]), target)
        for slot, row, target in zip(batch.slots.tolist(), batch.rows.tolist(), batch.targets.tolist(), strict=True)
    }


def expected(samples: list[TrainSample]) -> dict[int, tuple[int, int]]:
    pairs = [(s.token_ids[p - 1], s.token_ids[p]) for s in samples for p in range(s.prompt_length, len(s.token_ids))]
    return dict(enumerate(pairs))


@pytest.mark.parametrize("samples", SETS, ids=len)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("multiple", [1, 2, 8])
@pytest.mark.parametrize("kind", ["zigzag", "allgather"])
def test_packed_rows_of_all_ranks_cover_every_active_token_once(
    samples: list[TrainSample], ranks: int, multiple: int, kind: CpLayout
) -> None:
    slots = first_slots(samples)[:-1]
    batches = [packed_batch(samples, slots, rank=r, ranks=ranks, multiple=multiple, kind=kind) for r in range(ranks)]
    found: dict[int, tuple[int, int]] = {}
    for batch in batches:
        mine = scored(batch)
        assert not found.keys() & mine.keys()
        assert batch.slots.tolist() == sorted(batch.slots.tolist())
        assert batch.ids.shape == (1, batches[0].ids.shape[1])
        assert batch.ids.shape[1] % multiple == 0
        found |= mine
    assert found == expected(samples)


@pytest.mark.parametrize("samples", SETS, ids=len)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gathered_keys_come_back_in_order_of_position(samples: list[TrainSample], ranks: int) -> None:
    slots = first_slots(samples)[:-1]
    batches = [packed_batch(samples, slots, rank=r, ranks=ranks, multiple=2) for r in range(ranks)]
    packings = [batch.packing for batch in batches]
    gathered_ids = torch.cat([batch.ids[0] for batch in batches])
    gathered_positions = torch.cat([p.positions for p in packings if p is not None])
    for packing in packings:
        assert packing is not None
        order = packing.key_order if packing.key_order is not None else torch.arange(gathered_ids.numel())
        ids, positions = gathered_ids[order], gathered_positions[order]
        bounds = packing.keys.tolist()
        assert bounds[-1] == ids.numel()
        assert packing.queries.tolist()[-1] == packing.positions.numel()
        for which, (start, end) in enumerate(itertools.pairwise(bounds)):
            assert positions[start:end].tolist() == list(range(end - start))
            if which < len(samples):
                tokens = samples[which].token_ids
                assert ids[start : start + len(tokens)].tolist() == list(tokens)


@pytest.mark.parametrize("samples", SETS, ids=len)
@pytest.mark.parametrize("multiple", [1, 4])
def test_padded_rows_cover_every_active_token_once(samples: list[TrainSample], multiple: int) -> None:
    batch = padded_batch(samples, first_slots(samples)[:-1], multiple=multiple)
    assert batch.ids.shape[1] % multiple == 0
    assert scored(batch) == expected(samples)


def test_zigzag_worked_example() -> None:
    one = [sample(0, 3, 8)]
    first, second = (packed_batch(one, [0], rank=r, ranks=2, multiple=1) for r in range(2))
    assert owned_runs(11, 0, 2) == [range(0, 3), range(9, 12)]
    assert first.rows.tolist() == [2, 3]
    assert [t - 1000 for t in first.targets.tolist()] == [3, 10]
    assert second.rows.tolist() == list(range(6))
    assert [t - 1000 for t in second.targets.tolist()] == [4, 5, 6, 7, 8, 9]


def test_groups_are_consecutive_and_within_the_limit() -> None:
    samples = [sample(i, 2, length) for i, length in enumerate((3, 3, 20, 1, 1, 1))]
    groups = group_samples(samples, 10)
    assert groups == [range(0, 2), range(2, 3), range(3, 6)]
    assert group_samples([], 10) == []


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["zigzag", "allgather"])
def test_samples_in_whole_groups_of_rows_lie_alike_on_any_number_of_ranks(ranks: int, kind: CpLayout) -> None:
    samples = SETS[3]
    slots = first_slots(samples)[:-1]
    batches = [packed_batch(samples, slots, rank=r, ranks=ranks, multiple=1, each=16, kind=kind) for r in range(ranks)]
    everyones = torch.cat([batch.ids[0] for batch in batches])
    order = batches[0].packing.key_order if batches[0].packing is not None else None
    rows = everyones if order is None else everyones[order]
    alone = packed_batch(samples, slots, rank=0, ranks=1, multiple=1, each=16)
    assert rows.tolist() == alone.ids[0].tolist()
    for place, one in enumerate(samples):
        assert rows[16 * place : 16 * place + len(one.token_ids)].tolist() == list(one.token_ids)
    found: dict[int, tuple[int, int]] = {}
    for batch in batches:
        found |= scored(batch)
    assert found == expected(samples)


def test_a_micro_batch_moves_as_a_whole() -> None:
    batch = packed_batch(SETS[2], first_slots(SETS[2])[:-1], rank=0, ranks=2, multiple=1)
    moved = batch.to(torch.device("meta"))
    tensors = [moved.ids, moved.rows, moved.targets, moved.slots]
    assert moved.packing is not None
    assert moved.packing.key_order is not None
    tensors += [moved.packing.positions, moved.packing.queries, moved.packing.keys, moved.packing.key_order]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.segment == batch.segment
