"""A step's samples as micro-batches: which data-parallel rank gets which, and in which groups.

The batch is cut into a fixed number of contiguous segments, by its own lengths alone. A data-parallel rank holds an
equal run of segments, and no micro-batch reaches over the end of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from samebits.into_megatron import layout
from samebits.into_megatron.config import TrainerConfig
from samebits.into_megatron.layout import MicroBatch
from samebits.into_megatron.sampling import Sampling
from samebits.timeline.types import TrainSample

# Matrix units sum a weight's gradient over so many rows at a time (8 or 16): no such group may reach over two samples
# where its bits must not depend on what stands before a sample.
_ROWS = 16


def segments_of(samples: Sequence[TrainSample], count: int) -> list[range]:
    """`count` contiguous runs of samples with about equal numbers of tokens; some may be empty."""
    total, before, ends = sum(len(sample.token_ids) for sample in samples), 0, [0] * count
    for index, sample in enumerate(samples):
        length = len(sample.token_ids)
        segment = min(count - 1, (2 * before + length) * count // (2 * total))
        ends[segment], before = index + 1, before + length
    runs, start = [], 0
    for end in ends:
        runs.append(range(start, max(start, end)))
        start = max(start, end)
    return runs


def micro_batches(
    samples: Sequence[TrainSample], config: TrainerConfig, dp_rank: int, cp_rank: int
) -> list[MicroBatch]:
    """This rank's micro-batches, in order of segment. Every data-parallel rank has equally many: where samples run
    out, a micro-batch without active tokens fills the place."""
    limit = config.max_tokens_per_gpu * config.cp
    plans: list[list[tuple[int, range]]] = [[] for _ in range(config.dp)]
    each = config.gradient_segments // config.dp
    for segment, run in enumerate(segments_of(samples, config.gradient_segments)):
        for group in layout.group_samples(samples[run.start : run.stop], limit):
            plans[segment // each].append((segment, range(run.start + group.start, run.start + group.stop)))
    count = max(1, *map(len, plans))
    if config.vpp > 1:
        count += -count % config.pp  # the interleaved schedule works in rounds of one micro-batch per stage
    own = plans[dp_rank]
    last = own[-1][0] if own else dp_rank * each
    own = own + [(last, range(0))] * (count - len(own))
    slots = layout.first_slots(samples)
    sampling = Sampling.of(samples, config.temperature)
    return [sampling.put_into(_batch(samples, slots, group, segment, config, cp_rank)) for segment, group in own]


def _batch(
    samples: Sequence[TrainSample],
    slots: Sequence[int],
    group: range,
    segment: int,
    config: TrainerConfig,
    cp_rank: int,
) -> MicroBatch:
    members, places = [samples[i] for i in group], [slots[i] for i in group]
    multiple = config.tp if config.sequence_parallel else 1
    if config.case.attention == "P":
        batch = layout.padded_batch(members, places, multiple=multiple)
    else:
        batch = layout.packed_batch(
            members,
            places,
            rank=cp_rank,
            ranks=config.cp,
            multiple=multiple,
            each=_ROWS if config.strict_gradients and config.device == "cuda" else 1,
            kind=config.cp_layout,
        )
    return replace(batch, segment=segment)
