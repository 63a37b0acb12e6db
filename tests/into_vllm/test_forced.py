"""Recorded tokens stay with their request, whichever row vLLM moves it to."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from samebits.into_vllm.forced import ForcedTokens, force_native

ROWS = 8


def processor() -> ForcedTokens:
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=ROWS))
    return ForcedTokens(config, torch.device("cpu"), False)


def params(tokens: list[int] | None) -> SamplingParams:
    extra = None if tokens is None else {"samebits_forced": tokens}
    return SamplingParams(max_tokens=len(tokens or [0]), extra_args=extra)


def test_requests_keep_their_tokens_when_rows_move() -> None:
    """Random moves and removals, against a plain list of what lies where."""
    draw = random.Random(7)
    held = processor()
    requests = [([draw.randrange(100) for _ in range(9)], []) for _ in range(ROWS)]
    added = [(row, params(wanted), None, produced) for row, (wanted, produced) in enumerate(requests)]
    held.update_state(BatchUpdate(batch_size=ROWS, removed=[], added=added, moved=[]))
    rows: list[Any] = list(requests)
    for _ in range(300):
        source, target = draw.sample(range(ROWS), 2)
        swap = draw.random() < 0.8 or rows[source] is None
        direction = MoveDirectionality.SWAP if swap else MoveDirectionality.UNIDIRECTIONAL
        rows[source], rows[target] = (rows[target] if swap else None), rows[source]
        held.update_state(BatchUpdate(ROWS, removed=[], added=[], moved=[(source, target, direction)]))
        for _, produced in filter(None, rows):
            produced.append(0)
            del produced[draw.randrange(9) :]
        expected = [-1 if row is None else row[0][len(row[1])] for row in rows]
        assert held.put_into(torch.full((ROWS,), -1)).tolist() == expected


def test_requests_without_recorded_tokens_are_drawn_as_ever() -> None:
    held = processor()
    added = [(0, params(None), None, []), (1, params([7, 8]), None, [7])]
    held.update_state(BatchUpdate(batch_size=2, removed=[], added=added, moved=[]))
    assert held.put_into(torch.tensor([3, 4])).tolist() == [3, 8]


@pytest.mark.parametrize(
    ("tokens", "most", "message"), [("7", 1, "must be a list"), ([1.5], 1, "must be a list"), ([1, 2], 3, "max_tokens")]
)
def test_wrong_tokens_are_refused(tokens: Any, most: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ForcedTokens.validate_params(SamplingParams(max_tokens=most, extra_args={"samebits_forced": tokens}))


def test_a_native_sampler_without_the_tokens_refuses() -> None:
    sampler = SimpleNamespace(sample=lambda logits, metadata: (torch.tensor([1]), None))
    force_native(sampler)
    metadata = SimpleNamespace(logitsprocs=SimpleNamespace(argmax_invariant=[]))
    with pytest.raises(RuntimeError, match="recorded tokens is not loaded"):
        sampler.sample(None, metadata)
