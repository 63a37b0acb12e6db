"""Trainers that tests run in real processes: samples, jobs, what every rank returned, and the oracle."""

from __future__ import annotations

import contextlib
import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samebits.contract.routes import ModuleRoutes
from samebits.into_megatron.config import TrainerConfig
from samebits.into_megatron.model import read_shape
from samebits.into_megatron.weights import read_tensors
from samebits.ops.attention import attention
from samebits.ops.embedding import embedding
from samebits.ops.linear import linear
from samebits.ops.logprob import linear_logp
from samebits.ops.rms_norm import rms_norm
from samebits.ops.rotary import rotary, rotary_table
from samebits.ops.sample_support import Kept, kept_linear_logp
from samebits.ops.swiglu import swiglu
from samebits.testing.ranks import Rank, run_ranks
from samebits.timeline.types import SampleKey, Support, TrainSample

VOCAB = 101


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


def with_supports(samples: list[TrainSample]) -> list[TrainSample]:
    """Three of four tokens in a support of some ids, from the token alone to all; every fifth sample without one."""
    draw = random.Random(7)
    limited = []
    for index, sample in enumerate(samples):
        rows = [
            sorted({token, *draw.sample(range(VOCAB), draw.choice((0, 1, 5, 20, VOCAB)))})
            if draw.random() < 0.75
            else []
            for token in sample.token_ids[sample.prompt_length :]
        ]
        limited.append(replace(sample, support=Support.of(rows) if index % 5 else None))
    return limited


def flat(bits: dict[SampleKey, tuple[int, ...]]) -> Tensor:
    return torch.tensor([b for values in bits.values() for b in values]).to(torch.uint32).view(torch.float32)


def preload() -> None:
    import samebits.into_megatron.trainer  # noqa: F401  each rank would take seconds over it


def run_job(me: Rank, name: str, job: dict[str, Any], directory: str) -> dict[str, Tensor]:
    """One trainer's life: score, `steps` training steps, export. Tensors are named `job/what`."""
    from samebits.into_megatron.trainer import TrainerRank

    settings = {**job["config"], "case": ModuleRoutes(**job.get("case", {}))}
    if me.world > 1:
        settings["rendezvous"] = f"{directory}/{name}.rendezvous"
    trainer = TrainerRank(TrainerConfig(**settings), me.rank)
    samples = with_supports(make_samples()) if job.get("limited") else make_samples()
    with FAULTS[job.get("fault", "none")](trainer):
        out = train(trainer, samples, job)
    trainer.export(f"{directory}/{name}")
    record = trainer.proof()
    assert json.loads(json.dumps(record))["case"] == settings["case"].groups()
    check_record(record)
    trainer.close()
    return {f"{name}/{key}": tensor for key, tensor in out.items()}


def train(trainer: Any, samples: list[TrainSample], job: dict[str, Any]) -> dict[str, Tensor]:
    out = {"score": flat(trainer.score(samples))}
    if job.get("alone"):
        out["alone"] = torch.cat([flat(trainer.score([sample])) for sample in samples])
    norms = []
    for step in range(job.get("steps", 0)):
        result = trainer.train_step(step, samples)
        norms.append(result.grad_norm)
        metrics = (result.loss, result.policy_loss, result.kl, result.ratio_mean, result.clip_fraction, result.tokens)
        out[f"metrics{step}"] = torch.tensor(metrics, dtype=torch.float64)
        out[f"logp{step}"] = flat(result.logp_bits)
        if step == 0:
            out |= {f"grad/{n}": p.main_grad.clone() for n, p in trainer.named_parameters()}
    out["norms"] = torch.tensor(norms, dtype=torch.float64)
    return out


@contextlib.contextmanager
def wrong_epsilon(trainer: Any) -> Iterator[None]:
    """One norm of one rank."""
    if trainer.rank == 0:
        trainer.policy[0].module.decoder.layers[0].input_layernorm.eps *= 2.0
    yield


@contextlib.contextmanager
def wrong_tree(trainer: Any) -> Iterator[None]:
    """One rank adds ranks and parts in another order."""
    from samebits.into_megatron import gradients

    if trainer.rank != 0:
        yield
        return
    right, gradients.fold_neighbours = gradients.fold_neighbours, lambda parts: sum(parts[1:], parts[0])
    yield
    gradients.fold_neighbours = right


@contextlib.contextmanager
def lost_batch(trainer: Any) -> Iterator[None]:
    """The last micro-batch of every rank never comes."""
    whole = trainer._micro_batches
    trainer._micro_batches = lambda samples: whole(samples)[:-1]
    yield


@contextlib.contextmanager
def at_once(trainer: Any) -> Iterator[None]:
    """No fault: no weight gradient waits for others."""
    for _, parameter in trainer.named_parameters():
        parameter.main_grad.__dict__.pop("later", None)
    yield


@contextlib.contextmanager
def lost_work(trainer: Any) -> Iterator[None]:
    """Weight gradients that wait are forgotten."""
    for chunk in trainer.policy:
        chunk._later.run = chunk._later.drop
    yield


FAULTS: dict[str, Callable[[Any], contextlib.AbstractContextManager[None]]] = {
    "none": contextlib.nullcontext,
    "epsilon": wrong_epsilon,
    "tree": wrong_tree,
    "lost": lost_batch,
    "at once": at_once,
    "lost work": lost_work,
}


def check_record(record: dict[str, Any]) -> None:
    """Every boundary was called, by the code that the case names; the kernels counted if any is ours."""
    assert all(patch["in_place"] for patch in record["patches"])
    assert any(record["counters"].values()) == ("R" in record["case"].values())
    for place, module in record["modules"].items():
        assert module["calls"] > 0, f"{place} was never called"
        wanted = record["case"].get(module["group"], module["route"])
        assert module["route"] == wanted, f"{place}: {module['implementation']}"
    if record["parallel"]["pp"] > 1:
        return
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

    def staged_gradients(self, job: str, tp: int, stages: int) -> list[dict[str, Tensor]]:
        """Every tensor-parallel rank's gradients, of all pipeline stages; the first data and context ranks hold all."""
        everyone = self.gradients(job, len(self.ranks))
        each = len(self.ranks) // stages
        return [
            {k: g for stage in reversed(range(stages)) for k, g in everyone[stage * each + t].items()}
            for t in range(tp)
        ]

    def weights(self, job: str) -> dict[str, Tensor]:
        return read_tensors(self.directory / job)


def launch(directory: Path, world: int, jobs: dict[str, dict[str, Any]]) -> Results:
    ranks = run_ranks(__file__, "jobs_program", world, directory, json.dumps(jobs), str(directory))
    return Results(ranks, directory)


def strict(model: str, **settings: Any) -> dict[str, Any]:
    # max_tp = 2 everywhere: one rank then cuts K as two ranks do.
    return {"model": model, "max_tp": 2, "lr": 1e-3, "kl_coef": 0.1, "reference": model, **settings}


@torch.no_grad()
def oracle(
    path: str, samples: list[TrainSample], temperature: float = 1.0, segments: int = 2, device: str = "cpu"
) -> Tensor:
    """Every sample by itself, straight through the ops: no Megatron, no packing, no ranks."""
    shape, w = read_shape(path), {name: tensor.to(device) for name, tensor in read_tensors(path).items()}
    cos, sin = (part.to(device) for part in rotary_table(shape.head_dim, shape.rope_base, shape.max_positions))
    head = w["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
    out = []
    for sample in samples:
        ids = torch.tensor(sample.token_ids, device=device)
        count = len(ids)
        positions = torch.arange(count, device=device)
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
            bounds = torch.tensor([0, count], dtype=torch.int32, device=device)
            a = attention(q, k, v, bounds, shape.head_dim**-0.5).reshape(count, -1)
            h = h + linear(a, w[f"{at}self_attn.o_proj.weight"], segments=segments)
            x = rms_norm(h, w[f"{at}post_attention_layernorm.weight"], shape.eps)
            gate_up = torch.cat([w[f"{at}mlp.gate_proj.weight"], w[f"{at}mlp.up_proj.weight"]])
            h = h + linear(swiglu(linear(x, gate_up)), w[f"{at}mlp.down_proj.weight"], segments=segments)
        h = rms_norm(h, w["model.norm.weight"], shape.eps)[sample.prompt_length - 1 : -1]
        out.append(_scored(h.contiguous(), head, ids[sample.prompt_length :], temperature, sample.support))
    return torch.cat(out).cpu()


def _scored(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, support: Support | None) -> Tensor:
    """Token by token where there is a support."""
    if support is None:
        return linear_logp(hidden, head, targets, temperature)
    scores = []
    for at, ids in enumerate(support.rows()):
        row = hidden[at : at + 1], head, targets[at : at + 1]
        kept = Kept.of([list(ids)])
        scores.append(kept_linear_logp(*row, kept, temperature) if ids else linear_logp(*row, temperature))
    return torch.cat(scores)
