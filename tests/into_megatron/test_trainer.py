"""Real Megatron-Core ranks in real processes: one forward, one set of bits, however it is cut."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits.bits import assert_same, first_difference
from samebits.into_megatron.config import TrainerCase, TrainerConfig
from samebits.into_megatron.model import read_shape
from samebits.into_megatron.weights import from_megatron, read_tensors
from samebits.ops.attention import attention
from samebits.ops.embedding import embedding
from samebits.ops.linear import linear
from samebits.ops.logprob import linear_logp
from samebits.ops.rms_norm import rms_norm
from samebits.ops.rotary import rotary, rotary_table
from samebits.ops.swiglu import swiglu
from samebits.testing.ranks import Rank, run_ranks
from samebits.testing.tiny_models import write_tiny_model
from samebits.timeline.types import SampleKey, TrainSample

VOCAB = 101
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3-tied": {"tie_word_embeddings": True},
    "qwen2-bias": {"architecture": "Qwen2ForCausalLM"},
    "llama": {"architecture": "LlamaForCausalLM", "num_key_value_heads": 4},
}


def make_samples(count: int = 24, seed: int = 1) -> list[TrainSample]:
    """More than 256 active tokens, lengths from 2 to 80; rollout values near what such a model would say."""
    draw = random.Random(seed)
    samples = []
    for index in range(count):
        # The first has one token of each kind: the shortest sample there is.
        prompt, response = (draw.randint(1, 40), draw.randint(1, 40)) if index else (1, 1)
        ids = tuple(draw.randrange(VOCAB) for _ in range(prompt + response))
        bits = tuple(struct.unpack("<I", struct.pack("<f", draw.uniform(-6, -3)))[0] for _ in range(response))
        samples.append(TrainSample(SampleKey(0, index // 4, index % 4), ids, prompt, draw.uniform(-1, 1), bits))
    return samples


def flat(bits: dict[SampleKey, tuple[int, ...]]) -> Tensor:
    return torch.tensor([b for values in bits.values() for b in values]).to(torch.uint32).view(torch.float32)


def run_job(me: Rank, name: str, job: dict[str, Any], directory: str) -> dict[str, Tensor]:
    """One trainer's life: score, `steps` training steps, export. Tensors are named `job/what`."""
    from samebits.into_megatron.trainer import TrainerRank

    settings = {**job["config"], "case": TrainerCase(**job.get("case", {}))}
    if me.world > 1:
        settings["rendezvous"] = f"{directory}/{name}.rendezvous"
    trainer = TrainerRank(TrainerConfig(**settings), me.rank)
    samples = make_samples()
    out = {"score": flat(trainer.score(samples))}
    if job.get("alone"):
        out["alone"] = torch.cat([flat(trainer.score([sample])) for sample in samples])
    norms = []
    for step in range(job.get("steps", 0)):
        result = trainer.train_step(step, samples)
        norms.append(result.grad_norm)
        out[f"logp{step}"] = flat(result.logp_bits)
        if step == 0:
            parameters = trainer.policy.module.named_parameters()
            out |= {f"grad/{n}": p.main_grad.clone() for n, p in parameters}
    out["norms"] = torch.tensor(norms, dtype=torch.float64)
    trainer.export(f"{directory}/{name}")
    record = trainer.proof()
    assert json.loads(json.dumps(record))["case"] == settings["case"].groups()
    check_record(record)
    trainer.close()
    return {f"{name}/{key}": tensor for key, tensor in out.items()}


def check_record(record: dict[str, Any]) -> None:
    """Every boundary was called, by the code that the case names; the kernels counted if any is ours."""
    assert all(patch["in_place"] for patch in record["patches"])
    for place, module in record["modules"].items():
        assert module["calls"] > 0, f"{place} was never called"
        wanted = record["case"].get(module["group"], module["route"])
        assert module["route"] == wanted, f"{place}: {module['implementation']}"
    assert {m["group"] for m in record["modules"].values()} == {"embedding", "attention", "ffn", "logp"}
    assert {m["boundary"] for m in record["modules"].values()} == {
        "embedding",
        "rms_norm",
        "linear",
        "rotary",
        "attention",
        "swiglu",
        "logprob",
    }
    assert any(record["counters"].values()) == ("R" in record["case"].values())


def jobs_program(me: Rank, jobs: str, directory: str) -> dict[str, Tensor]:
    """Several jobs, one after the other, in the same processes."""
    out: dict[str, Tensor] = {}
    for name, job in json.loads(jobs).items():
        out |= run_job(me, name, job, directory)
    return out


class Results:
    """What every rank of every job returned, and where the weights were written."""

    def __init__(self, ranks: list[dict[str, Tensor]], directory: Path) -> None:
        self.ranks = ranks
        self.directory = directory

    def __call__(self, job: str, what: str, rank: int = 0) -> Tensor:
        return self.ranks[rank][f"{job}/{what}"]

    def gradients(self, job: str, ranks: int) -> list[dict[str, Tensor]]:
        prefix = f"{job}/grad/"
        return [{k.removeprefix(prefix): v for k, v in r.items() if k.startswith(prefix)} for r in self.ranks[:ranks]]

    def weights(self, job: str) -> dict[str, Tensor]:
        return read_tensors(self.directory / job)


def launch(directory: Path, world: int, jobs: dict[str, dict[str, Any]]) -> Results:
    ranks = run_ranks(__file__, "jobs_program", world, directory, json.dumps(jobs), str(directory))
    return Results(ranks, directory)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    at = tmp_path_factory.mktemp("models")
    return {name: str(write_tiny_model(at / name, **changes)) for name, changes in MODELS.items()}


def strict(model: str, **settings: Any) -> dict[str, Any]:
    # max_tp = 2 everywhere: one rank then cuts K as two ranks do.
    return {"model": model, "max_tp": 2, "lr": 1e-3, "kl_coef": 0.1, "reference": model, **settings}


@pytest.fixture(scope="module")
def one_rank(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    qwen3 = models["qwen3"]
    jobs = {
        "whole": {"config": strict(qwen3, max_tokens_per_gpu=10_000), "steps": 2},
        "cut": {"config": strict(qwen3, max_tokens_per_gpu=90), "steps": 2, "alone": True},
        "threads": {"config": strict(qwen3, max_tokens_per_gpu=10_000, threads=2), "steps": 2},
        "cold": {"config": strict(qwen3, temperature=0.7)},
        "one-segment": {"config": strict(qwen3, max_tp=1)},
        **{name: {"config": strict(path), "steps": 1} for name, path in models.items() if name != "qwen3"},
    }
    return launch(tmp_path_factory.mktemp("one"), 1, jobs)


@pytest.fixture(scope="module")
def again(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    jobs = {"whole": {"config": strict(models["qwen3"], max_tokens_per_gpu=10_000), "steps": 2}}
    return launch(tmp_path_factory.mktemp("again"), 1, jobs)


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    qwen3 = models["qwen3"]
    jobs = {
        "tp": {"config": strict(qwen3, tp=2), "steps": 2},
        "sp": {"config": strict(qwen3, tp=2, sequence_parallel=True, max_tokens_per_gpu=200), "steps": 2},
        "cp": {"config": strict(qwen3, cp=2, max_tokens_per_gpu=200), "steps": 2, "alone": True},
        "tp-tied": {"config": strict(models["qwen3-tied"], tp=2), "steps": 1},
        "tp-bias": {"config": strict(models["qwen2-bias"], tp=2), "steps": 1},
    }
    return launch(tmp_path_factory.mktemp("two"), 2, jobs)


@torch.no_grad()
def oracle(path: str, samples: list[TrainSample], temperature: float = 1.0, segments: int = 2) -> Tensor:
    """Every sample by itself, straight through the ops: no Megatron, no packing, no ranks."""
    shape, w = read_shape(path), read_tensors(path)
    cos, sin = rotary_table(shape.head_dim, shape.rope_base, shape.max_positions)
    head = w["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
    out = []
    for sample in samples:
        ids = torch.tensor(sample.token_ids)
        count = len(ids)
        positions = torch.arange(count)
        h = embedding(ids, w["model.embed_tokens.weight"])
        for layer in range(shape.layers):
            at = f"model.layers.{layer}."
            x = rms_norm(h, w[f"{at}input_layernorm.weight"], shape.eps)
            q, k, v = (
                linear(x, w[f"{at}self_attn.{n}_proj.weight"], w.get(f"{at}self_attn.{n}_proj.bias")).view(
                    count, -1, shape.head_dim
                )
                for n in "qkv"
            )
            if shape.qk_norm:
                q = rms_norm(q, w[f"{at}self_attn.q_norm.weight"], shape.eps)
                k = rms_norm(k, w[f"{at}self_attn.k_norm.weight"], shape.eps)
            q, k = rotary(q, positions, cos, sin), rotary(k, positions, cos, sin)
            bounds = torch.tensor([0, count], dtype=torch.int32)
            a = attention(q, k, v, bounds, shape.head_dim**-0.5).reshape(count, -1)
            h = h + linear(a, w[f"{at}self_attn.o_proj.weight"], segments=segments)
            x = rms_norm(h, w[f"{at}post_attention_layernorm.weight"], shape.eps)
            gate_up = torch.cat([w[f"{at}mlp.gate_proj.weight"], w[f"{at}mlp.up_proj.weight"]])
            h = h + linear(swiglu(linear(x, gate_up)), w[f"{at}mlp.down_proj.weight"], segments=segments)
        h = rms_norm(h, w["model.norm.weight"], shape.eps)[sample.prompt_length - 1 : -1]
        out.append(linear_logp(h.contiguous(), head, ids[sample.prompt_length :], temperature))
    return torch.cat(out)


def test_the_batch_is_large_enough_to_show_a_difference() -> None:
    assert sum(sample.response_length for sample in make_samples()) >= 256


@pytest.mark.parametrize("model", MODELS)
def test_log_probabilities_are_the_oracle_s(one_rank: Results, models: dict[str, str], model: str) -> None:
    job = "whole" if model == "qwen3" else model
    expected = oracle(models[model], make_samples())
    assert_same(one_rank(job, "score"), expected, f"{model}: score")
    assert_same(one_rank(job, "logp0"), expected, f"{model}: the forward that is differentiated")


def test_temperature_is_applied_once(one_rank: Results, models: dict[str, str]) -> None:
    assert_same(one_rank("cold", "score"), oracle(models["qwen3"], make_samples(), 0.7), "temperature 0.7")


def test_these_comparisons_can_fail(one_rank: Results, models: dict[str, str], tmp_path: Path) -> None:
    segments = first_difference(one_rank("one-segment", "score"), one_rank("whole", "score"))
    assert segments is not None
    assert segments.count >= 5
    assert first_difference(one_rank("whole", "logp1"), one_rank("whole", "logp0")) is not None


def test_micro_batches_change_no_bit(one_rank: Results) -> None:
    """Not of log-probabilities, gradients, norms, or weights after two steps."""
    assert_same(one_rank("cut", "alone"), one_rank("whole", "score"), "samples scored alone")
    compare_runs(one_rank, "cut", one_rank, "whole")


def test_threads_change_no_bit(one_rank: Results) -> None:
    compare_runs(one_rank, "threads", one_rank, "whole")


def test_the_same_run_twice_gives_the_same_weights(one_rank: Results, again: Results) -> None:
    compare_runs(again, "whole", one_rank, "whole")


def compare_runs(left: Results, left_job: str, right: Results, right_job: str) -> None:
    for what in ("score", "logp0", "logp1", "norms"):
        assert_same(left(left_job, what), right(right_job, what), what)
    for name, grad in right.gradients(right_job, 1)[0].items():
        assert_same(left(left_job, f"grad/{name}"), grad, f"gradient of {name}")
    for name, weight in right.weights(right_job).items():
        assert_same(left.weights(left_job)[name], weight, f"{name} after two steps")


@pytest.mark.parametrize("job", ["tp", "sp", "cp"])
def test_ranks_change_no_bit_of_a_log_probability(two_ranks: Results, one_rank: Results, job: str) -> None:
    if job == "cp":
        # A short sample alone leaves one of the ranks without any active token.
        assert_same(two_ranks("cp", "alone"), one_rank("whole", "score"), "samples scored alone")
    for rank in range(2):
        assert_same(two_ranks(job, "score", rank), one_rank("whole", "score"), f"{job}, rank {rank}: score")
        assert_same(two_ranks(job, "logp0", rank), one_rank("whole", "logp0"), f"{job}, rank {rank}: step 0")


@pytest.mark.parametrize(("job", "single"), [("tp-tied", "qwen3-tied"), ("tp-bias", "qwen2-bias")])
def test_tied_and_biased_models_split_alike(
    two_ranks: Results, one_rank: Results, job: str, single: str, models: dict[str, str]
) -> None:
    assert_same(two_ranks(job, "score"), one_rank(single, "score"), job)
    compare_gradients(two_ranks, job, 2, one_rank, single, models[single])


@pytest.mark.parametrize(("job", "ranks"), [("tp", 2), ("sp", 2), ("cp", 1)])
def test_gradients_of_ranks_agree_with_one_rank(
    two_ranks: Results, one_rank: Results, models: dict[str, str], job: str, ranks: int
) -> None:
    compare_gradients(two_ranks, job, ranks, one_rank, "whole", models["qwen3"])
    assert two_ranks(job, "norms")[0].item() == pytest.approx(one_rank("whole", "norms")[0].item(), rel=2e-3)


def compare_gradients(left: Results, job: str, ranks: int, right: Results, single: str, path: str) -> None:
    """Each rank rounds its part of an input gradient to bf16, so gradients agree closely, not by bits."""
    shape = read_shape(path)
    split = from_megatron(left.gradients(job, ranks), shape)
    whole = from_megatron(right.gradients(single, 1), shape)
    for name, grad in whole.items():
        error = (split[name].double() - grad.double()).norm() / grad.double().norm()
        assert error < 2e-2, f"{job}: gradient of {name} is off by {error:.4f}"


@pytest.mark.parametrize("job", ["tp", "sp", "cp"])
def test_all_ranks_hold_the_same_norm_and_the_first_writes_all_weights(two_ranks: Results, job: str) -> None:
    assert_same(two_ranks(job, "norms", 0), two_ranks(job, "norms", 1), f"{job}: gradient norms")
    assert len(two_ranks.weights(job)) == 2 * 11 + 3


CASES = {
    "P/P/P": {"attention": "P", "ffn": "P", "logp": "P"},
    "R/P/P": {"attention": "R", "ffn": "P", "logp": "P"},
    "P/R/P": {"attention": "P", "ffn": "R", "logp": "P"},
    "P/P/R": {"attention": "P", "ffn": "P", "logp": "R"},
    "R/R/P": {"attention": "R", "ffn": "R", "logp": "P"},
}


def case_jobs(models: dict[str, str], **settings: Any) -> dict[str, dict[str, Any]]:
    names = {name.replace("/", ""): case for name, case in CASES.items()}
    jobs = {
        name: {"config": strict(models["qwen3"], **settings), "case": case, "steps": 2} for name, case in names.items()
    }
    tied = {
        f"{name}-tied": {"config": strict(models["qwen3-tied"], **settings), "case": CASES[case], "steps": 1}
        for name, case in (("PPR", "P/P/R"), ("RRP", "R/R/P"))
    }
    return {**jobs, **tied}


@pytest.fixture(scope="module")
def mixed(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(tmp_path_factory.mktemp("mixed"), 1, case_jobs(models))


@pytest.fixture(scope="module")
def mixed_two(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(tmp_path_factory.mktemp("mixed-two"), 2, case_jobs(models, tp=2))


@pytest.mark.parametrize("case", CASES)
def test_native_and_mixed_cases_train_and_differ_in_bits(mixed: Results, one_rank: Results, case: str) -> None:
    job = case.replace("/", "")
    close = mixed(job, "score") - one_rank("whole", "score")
    assert close.abs().max() < 0.5
    assert first_difference(mixed(job, "score"), one_rank("whole", "score")) is not None
    assert mixed(job, "norms")[0].item() == pytest.approx(one_rank("whole", "norms")[0].item(), rel=0.1)


@pytest.mark.parametrize("case", CASES)
def test_native_and_mixed_cases_train_on_two_ranks(mixed_two: Results, mixed: Results, case: str) -> None:
    job = case.replace("/", "")
    assert (mixed_two(job, "score") - mixed(job, "score")).abs().max() < 0.5
    assert mixed_two(job, "norms")[0].item() == pytest.approx(mixed(job, "norms")[0].item(), rel=0.1)


@pytest.mark.parametrize("job", ["PPR-tied", "RRP-tied"])
def test_a_tied_weight_gets_both_of_its_gradients(mixed: Results, one_rank: Results, job: str) -> None:
    """One of the two comes through autograd and one does not: neither may be lost."""
    name = "grad/embedding.word_embeddings.weight"
    ours, strict_ = mixed(job, name).double(), one_rank("qwen3-tied", name).double()
    assert (ours - strict_).norm() / strict_.norm() < 0.1
