"""Requests with every kind of limit in one batch: vLLM and Megatron-Core agree by bits, on one rank and on two."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from samebits.bits import assert_same
from samebits.cli.wiring import build_engine
from samebits.contract import run_contract
from samebits.contract.boundaries import BOUNDARIES
from samebits.into_megatron.config import TrainerConfig
from samebits.into_vllm.config import EngineConfig
from samebits.linear_logp.provider import CONTRACT_ID
from samebits.rl.processes import Host
from samebits.testing.ranks import Rank, run_ranks
from samebits.testing.tiny_models import write_tiny_model
from samebits.timeline.types import GenerateRequest, Rollout, SampleKey, Support, TrainSample

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {},
)
COUNT, TOKENS = 15, 24


def requests() -> list[GenerateRequest]:
    return [
        GenerateRequest(
            **{
                "key": SampleKey(1, i, 0), "prompt_ids": tuple(range(3, 8 + i)), "seed": 911 * i,
                "max_tokens": TOKENS, "temperature": 1.0, "stop_ids": (), **KINDS[i % len(KINDS)],
            }
        )
        for i in range(COUNT)
    ]  # fmt: skip


def generate(home: Path, model: Path, tp: int) -> list[Rollout]:
    contract = run_contract(BOUNDARIES, segments=2).as_data()
    config = EngineConfig(
        model=str(model), tp=tp, max_tp=2, contract=contract, max_model_len=64, max_num_seqs=16, kv_cache_gib=1 / 64
    )
    host = Host(f"engine-{tp}", home / f"engine-{tp}.log")
    try:
        host.start(build_engine, config).result(timeout=300)
        rollouts: list[Rollout] = host.call("generate", requests()).result(timeout=300)
        host.call("close").result(timeout=60)
    finally:
        host.kill()
    return rollouts


def as_json(rollouts: list[Rollout]) -> str:
    """What a trainer needs of them; a greedy token is scored at temperature 1."""
    return json.dumps(
        [
            {
                "ids": [*r.prompt_ids, *r.token_ids], "prompt": len(r.prompt_ids), "bits": r.logp_bits,
                "support": [list(ids) for ids in r.support.rows()] if r.support else None,
                "temperature": request.temperature or 1.0,
            }
            for r, request in zip(rollouts, requests(), strict=True)
        ]
    )  # fmt: skip


def samples(text: str) -> list[TrainSample]:
    return [
        TrainSample(
            SampleKey(1, i, 0), tuple(one["ids"]), one["prompt"], 0.5 - i / COUNT, tuple(one["bits"]),
            support=Support.of(one["support"]) if one["support"] else None, temperature=one["temperature"],
        )
        for i, one in enumerate(json.loads(text))
    ]  # fmt: skip


def preload() -> None:
    import samebits.into_megatron.trainer  # noqa: F401  each rank would take seconds over it


def train(me: Rank, model: str, rollouts: str) -> dict[str, torch.Tensor]:
    """Scores, one step, and the gradients behind it, in strict mode."""
    from samebits.into_megatron.trainer import TrainerRank

    config = TrainerConfig(
        model=model, tp=me.world, max_tp=2, rendezvous=me.rendezvous, linear_logp_contract=CONTRACT_ID,
        max_tokens_per_gpu=200, temperature=0.3,
    )  # fmt: skip
    trainer = TrainerRank(config, me.rank)
    batch = samples(Path(rollouts).read_text())
    out = {"score": flat(trainer.score(batch))}
    out["bare"] = flat(trainer.score([dataclasses.replace(sample, support=None) for sample in batch]))
    result = trainer.train_step(1, batch)
    out |= {"logp": flat(result.logp_bits), "ratio": torch.tensor(result.ratio_mean, dtype=torch.float64)}
    (chunk,) = trainer.policy
    head = dict(chunk.module.named_parameters())["output_layer.weight"]
    out["head"] = head.main_grad.clone()
    assert trainer.proof()["linear_logp"]["calls"]["native"] == 0
    trainer.close()
    return out


def flat(bits: dict[SampleKey, tuple[int, ...]]) -> torch.Tensor:
    return torch.tensor([b for values in bits.values() for b in values]).to(torch.uint32).view(torch.float32)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixed")


@pytest.fixture(scope="module")
def model(home: Path) -> Path:
    return write_tiny_model(home / "model", vocab_size=1000, eos_token_id=2)


@pytest.fixture(scope="module")
def rollouts(home: Path, model: Path) -> list[Rollout]:
    return generate(home, model, 1)


def test_two_engine_ranks_draw_keep_and_score_the_same(home: Path, model: Path, rollouts: list[Rollout]) -> None:
    for one, two in zip(rollouts, generate(home, model, 2), strict=True):
        assert (one.token_ids, one.logp_bits, one.support) == (two.token_ids, two.logp_bits, two.support)


def test_the_trainer_scores_the_same_bits_on_one_rank_and_on_two(
    home: Path, model: Path, rollouts: list[Rollout]
) -> None:
    (home / "rollouts.json").write_text(as_json(rollouts))
    wanted = torch.tensor([b for r in rollouts for b in r.logp_bits]).to(torch.uint32).view(torch.float32)
    assert len(wanted) >= 256
    arguments = (str(model), str(home / "rollouts.json"))
    (one,) = run_ranks(__file__, "train", 1, home / "one", *arguments)
    two = run_ranks(__file__, "train", 2, home / "two", *arguments)
    for rank, found in (("TP1", one), ("TP2 rank 0", two[0]), ("TP2 rank 1", two[1])):
        assert_same(found["score"], wanted, f"{rank}: score")
        assert_same(found["logp"], wanted, f"{rank}: logp")
        assert float(found["ratio"]) == 1.0
    limited = torch.tensor([r.support is not None for r in rollouts for _ in r.logp_bits])
    assert_same(one["bare"][~limited], wanted[~limited], "tokens that were drawn from all")
    assert int((one["bare"] == wanted)[limited].sum()) < int(limited.sum()) / 4, "renormalising shows"
    halves = torch.cat([part["head"] for part in two])[:1000]
    assert_same(halves, one["head"][:1000], "gradient of the LM head")
