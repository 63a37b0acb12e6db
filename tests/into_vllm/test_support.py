"""Top-k, top-p and min-p in the real engine: mixed in one batch, recorded, scored over what was kept."""

from __future__ import annotations

import dataclasses
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from hosted_engines import SEGMENTS, Engine, cramped, engine_config, hosted
from models import make_requests
from oracle import packed_logits, response_bits, response_rows

from samebits.bits import assert_same
from samebits.contract.routes import ModuleRoutes
from samebits.into_vllm.engine import RolloutEngine, _support
from samebits.ops.sample_support import Kept, Limits, kept_logprob, sample_support
from samebits.timeline.types import GenerateRequest, Rollout

KINDS = (
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
)
LIMITED = (1, 2, 3, 5)
TOKENS = 24


def mixed(count: int = 12) -> list[GenerateRequest]:
    plain = make_requests(count, TOKENS)
    return [dataclasses.replace(r, **KINDS[i % len(KINDS)]) for i, r in enumerate(plain)]


def facts(rollouts: list[Rollout]) -> list:
    return [(r.token_ids, r.logp_bits, r.support) for r in rollouts]


@pytest.fixture(scope="module")
def batch(strict: Engine) -> list[Rollout]:
    return strict("generate", mixed())


def test_a_draw_past_the_end_is_left_out_and_a_missing_one_is_noticed() -> None:
    request, kept = mixed(2)[1], {at: array("i", [7, 9]).tobytes() for at in range(3)}
    assert list(_support(request, (7, 9), kept).counts) == [2, 2]
    with pytest.raises(RuntimeError, match="supports of 3 tokens for 4 tokens"):
        _support(request, (7, 9, 7, 9), kept)


def test_only_limited_requests_have_supports(batch: list[Rollout]) -> None:
    for i, rollout in enumerate(batch):
        if i % len(KINDS) in LIMITED:
            assert rollout.support is not None
            assert rollout.support.problem(rollout.token_ids) == ""
            assert min(rollout.support.counts) >= 1
        else:
            assert rollout.support is None
    sizes = [len(ids) for r in batch if r.support for ids in r.support.rows()]
    assert min(sizes) == 1
    assert max(sizes) > 20


def test_the_bits_are_those_of_one_packed_forward_pass(batch: list[Rollout], tiny: Path) -> None:
    requests = mixed()
    assert sum(len(r.token_ids) for r in batch) >= 256
    expected = response_bits(tiny, batch, [r.temperature for r in requests], SEGMENTS)
    assert [r.logp_bits for r in batch] == expected
    free = [dataclasses.replace(r, support=None) for r in batch]
    plain = response_bits(tiny, free, [r.temperature for r in requests], SEGMENTS)
    same = [a == b for a, b in zip(expected, plain, strict=True)]
    assert [i % len(KINDS) in LIMITED for i in range(12)] == [not one for one in same], "renormalising shows"


def test_a_third_party_finds_the_same_supports(batch: list[Rollout], tiny: Path) -> None:
    logits = packed_logits(tiny, [[*r.prompt_ids, *r.token_ids] for r in batch], SEGMENTS)
    for rows, request, rollout in zip(response_rows(logits, batch), mixed(), batch, strict=True):
        limits = Limits.of(len(rows), request.top_k, request.top_p, request.min_p)
        kept = sample_support(rows, request.temperature, limits, backend="reference")
        found = rollout.support.ids.tolist() if rollout.support else []
        assert kept.ids.tolist() == found


def test_greedy_is_scored_at_temperature_one_over_all(batch: list[Rollout], strict: Engine) -> None:
    plain = dataclasses.replace(make_requests(1, TOKENS)[0], temperature=0.0)
    assert facts(strict("generate", [plain]))[0] == facts(batch)[0]


def test_batches_move_no_bit_and_no_support(strict: Engine, batch: list[Rollout]) -> None:
    assert facts(strict("generate", mixed()[::-1]))[::-1] == facts(batch)
    assert [facts(strict("generate", [r]))[0] for r in mixed()[:4]] == facts(batch)[:4]


def test_prompts_in_chunks_preemption_and_small_pages(home: Path, tiny: Path, batch: list[Rollout]) -> None:
    with hosted(home, "support-cramped", cramped(tiny)) as engine:
        assert facts(engine("generate", mixed())) == facts(batch)
        assert engine("preempted") > 0


def test_the_likeliest_tokens_and_the_drawn_one_among_them(strict: Engine, batch: list[Rollout], tiny: Path) -> None:
    count = 4
    answers = strict("likeliest", mixed(), count)
    logits = packed_logits(tiny, [[*r.prompt_ids, *r.token_ids] for r in batch], SEGMENTS)
    again = 0
    for rows, request, rollout, (ids, logp, ranks) in zip(
        response_rows(logits, batch), mixed(), batch, answers, strict=True
    ):
        kept = Kept.of([list(i) for i in rollout.support.rows()]) if rollout.support else Kept.all(len(rows))
        for at, (tokens, values, places) in enumerate(zip(ids, logp, ranks, strict=True)):
            assert tokens[0] == rollout.token_ids[at]
            likeliest = tokens if places[0] <= count and len(tokens) == count else tokens[1:]
            wanted = kept_logprob(
                rows[at : at + 1], torch.tensor([tokens]), request.temperature or 1.0, kept.select(torch.tensor([at]))
            )
            assert_same(torch.tensor([values]), wanted, f"{request.key} at {at}")
            drawn_again = [v for t, v in zip(tokens[1:], values[1:], strict=True) if t == tokens[0]]
            assert all(v == values[0] for v in drawn_again)
            again += bool(drawn_again) or places[0] <= count
            if len(likeliest) > 1 and tokens[0] not in tokens[1:] and places[0] > count:
                assert values[0] <= min(v for v in values[1:])
    assert again >= 100, "the drawn token is usually among the likeliest"


def engine_of(**changes: Any) -> RolloutEngine:
    """One that never started: requests are checked before vLLM sees them."""
    engine = object.__new__(RolloutEngine)
    engine.config = engine_config(Path("m"), **changes)
    return engine


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 0.0}, r"top_p in \(0, 1\]"),
        ({"min_p": 1.5}, r"min_p in \[0, 1\]"),
        ({"top_k": -5}, "top_k >= 0"),
        ({"top_p": 1 - 1e-9}, "limits nothing once it is rounded to fp32"),
    ],
)
def test_limits_out_of_range_are_refused(changes: dict[str, float], message: str) -> None:
    request = dataclasses.replace(make_requests(1, 4)[0], **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        engine_of()._check(request)


def test_the_native_sampler_is_asked_for_no_support() -> None:
    with pytest.raises(ValueError, match="does not say which tokens"):
        engine_of(case=ModuleRoutes(logp="P"))._check(dataclasses.replace(make_requests(1, 4)[0], top_k=2))


def test_penalties_are_refused_with_the_reason(strict: Engine) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(
        VLLMValidationError, match=r"presence_penalty = 0\.5 is not covered: a trainer would have to apply it"
    ):
        strict("penalised", make_requests(1, 4), 0.5)
    assert len(strict("generate", make_requests(1, 4))) == 1, "the engine still serves"
