"""Whatever vLLM does with a batch, tokens and log-probability bits stay; and they are the trainer's bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosted_engines import SEGMENTS, Engine, cramped, engine_config, hosted
from models import make_model, make_requests
from oracle import response_bits

from samebits.timeline.types import Rollout

REQUESTS = make_requests(12, tokens=24)


def facts(rollouts: list[Rollout]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(r.token_ids, r.logp_bits) for r in rollouts]


@pytest.fixture(scope="module")
def batch(strict: Engine) -> list[Rollout]:
    """The reference of this file: all requests in one batch."""
    return strict("generate", REQUESTS)


def test_the_bits_are_those_of_one_packed_forward_pass(batch: list[Rollout], tiny: Path) -> None:
    assert sum(len(r.token_ids) for r in batch) >= 256
    expected = response_bits(tiny, batch, [1.0] * len(batch), SEGMENTS)
    assert [r.logp_bits for r in batch] == expected


def test_the_comparison_can_fail(batch: list[Rollout], other: Path) -> None:
    expected = response_bits(other, batch, [1.0] * len(batch), SEGMENTS)
    assert all(r.logp_bits != bits for r, bits in zip(batch, expected, strict=True))


def test_again_one_at_a_time_and_in_another_order(strict: Engine, batch: list[Rollout]) -> None:
    assert facts(strict("generate", REQUESTS)) == facts(batch)
    assert [facts(strict("generate", [r]))[0] for r in REQUESTS[:3]] == facts(batch)[:3]
    assert facts(strict("generate", REQUESTS[::-1]))[::-1] == facts(batch)


def test_the_prefix_cache_was_hit(strict: Engine, batch: list[Rollout]) -> None:
    before = strict("prefix_hits")
    assert facts(strict("generate", REQUESTS)) == facts(batch)
    assert strict("prefix_hits") - before >= len(REQUESTS)


def test_every_request_has_its_own_temperature(strict: Engine, tiny: Path) -> None:
    temperatures = [0.0, 0.5, 1.0, 1.7] * 3
    requests = [make_requests(12, 16, temperature=t)[i] for i, t in enumerate(temperatures)]
    rollouts = strict("generate", requests)
    assert [r.logp_bits for r in rollouts] == response_bits(tiny, rollouts, temperatures, SEGMENTS)
    greedy = strict("generate", make_requests(1, 16, temperature=0.0))
    assert facts(greedy)[0] == facts(rollouts)[0]


def test_seeds_make_responses_differ(strict: Engine) -> None:
    first = make_requests(1, 24)[0]
    same_prompt = [first, *(r for r in make_requests(10, 24) if r.prompt_ids == first.prompt_ids)]
    tokens = {r.token_ids for r in strict("generate", same_prompt)}
    assert len(tokens) == len({r.seed for r in same_prompt}) == 2


def test_a_stop_token_ends_a_response(strict: Engine, batch: list[Rollout]) -> None:
    stop = batch[0].token_ids[5]
    cut = batch[0].token_ids.index(stop) + 1
    requests = [type(REQUESTS[0])(**{**vars(REQUESTS[0]), "stop_ids": (stop,)})]
    (rollout,) = strict("generate", requests)
    assert rollout.token_ids == batch[0].token_ids[:cut]
    assert rollout.logp_bits == batch[0].logp_bits[:cut]
    assert (rollout.finish_reason, batch[0].finish_reason) == ("stop", "length")


def test_chunked_prefill_preemption_and_small_pages(home: Path, tiny: Path, batch: list[Rollout]) -> None:
    with hosted(home, "cramped", cramped(tiny)) as engine:
        assert facts(engine("generate", REQUESTS)) == facts(batch)
        assert engine("preempted") > 0


def test_tied_weights_biases_wide_heads_and_padded_vocabulary(home: Path) -> None:
    model = make_model(
        home / "qwen2",
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        tie_word_embeddings=True,
        num_attention_heads=4,
        num_key_value_heads=1,
        hidden_size=512,
        head_dim=128,
        vocab_size=333,
    )
    with hosted(home, "qwen2", engine_config(model)) as engine:
        rollouts = engine("generate", REQUESTS)
        assert [r.logp_bits for r in rollouts] == response_bits(model, rollouts, [1.0] * 12, SEGMENTS)
        assert {s.name for s in engine("shards")}.isdisjoint({"lm_head.weight"})
