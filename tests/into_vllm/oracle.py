"""The forward pass of a dense decoder on packed sequences, straight from samebits ops: what a trainer computes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from samebits.bits import raw
from samebits.ops.attention import attention
from samebits.ops.embedding import embedding
from samebits.ops.linear import linear, matmul_f32
from samebits.ops.logprob import logprob
from samebits.ops.rms_norm import add_rms_norm, rms_norm
from samebits.ops.rotary import rotary, rotary_table
from samebits.ops.sample_support import Kept, kept_logprob
from samebits.ops.swiglu import swiglu
from samebits.timeline.types import Rollout


def response_bits(
    path: Path, rollouts: Sequence[Rollout], temperatures: Sequence[float], segments: int, device: str = "cpu"
) -> list:
    """fp32 bit patterns of every response token's log-probability over its support, from one packed forward pass."""
    sequences = [[*r.prompt_ids, *r.token_ids] for r in rollouts]
    logits = packed_logits(path, sequences, segments, device)
    bits = []
    for rows, rollout, temperature in zip(response_rows(logits, rollouts), rollouts, temperatures, strict=True):
        targets = torch.tensor(rollout.token_ids, device=device)
        if rollout.support is None:
            scores = logprob(rows, targets, temperature or 1.0)
        else:
            kept = Kept.of([list(ids) for ids in rollout.support.rows()])
            scores = kept_logprob(rows, targets[:, None], temperature or 1.0, kept)[:, 0].contiguous()
        bits.append(tuple(int(b) & 0xFFFFFFFF for b in raw(scores).tolist()))
    return bits


def response_rows(logits: Tensor, rollouts: Sequence[Rollout]) -> Iterator[Tensor]:
    """The rows of packed logits that predict each response's tokens."""
    start = 0
    for rollout in rollouts:
        stop = start + len(rollout.prompt_ids) + len(rollout.token_ids)
        yield logits[start + len(rollout.prompt_ids) - 1 : stop - 1]
        start = stop


@torch.no_grad()
def packed_logits(path: Path, sequences: Sequence[Sequence[int]], segments: int, device: str = "cpu") -> Tensor:
    """fp32 logits [tokens, vocabulary] of all sequences, packed."""
    config = json.loads((path / "config.json").read_text())
    w = load_file(path / "model.safetensors", device=device)
    eps, head, layers = config["rms_norm_eps"], config["head_dim"], config["num_hidden_layers"]
    ids = torch.tensor([t for s in sequences for t in s], device=device)
    positions = torch.cat([torch.arange(len(s), device=device) for s in sequences])
    ends = torch.tensor([0, *(len(s) for s in sequences)]).cumsum(0)
    cu = ends.to(device, torch.int32)
    cos, sin = rotary_table(head, config["rope_theta"], config["max_position_embeddings"])
    cos, sin = cos.to(device), sin.to(device)
    norm_heads = config["model_type"] == "qwen3"
    x, residual = embedding(ids, w["model.embed_tokens.weight"]), None
    for at in (f"model.layers.{i}." for i in range(layers)):
        h, residual = _norm(x, residual, w[f"{at}input_layernorm.weight"], eps)
        q, k, v = (linear(h, w[f"{at}self_attn.{n}_proj.weight"], w.get(f"{at}self_attn.{n}_proj.bias")) for n in "qkv")
        q, k, v = (t.view(len(ids), -1, head) for t in (q, k, v))
        if norm_heads:
            q = rms_norm(q, w[f"{at}self_attn.q_norm.weight"], eps)
            k = rms_norm(k, w[f"{at}self_attn.k_norm.weight"], eps)
        q, k = (rotary(t, positions, cos, sin) for t in (q, k))
        a = attention(q, k, v, cu, head**-0.5).reshape(len(ids), -1)
        x = linear(a, w[f"{at}self_attn.o_proj.weight"], segments=segments)
        h, residual = _norm(x, residual, w[f"{at}post_attention_layernorm.weight"], eps)
        gate_up = torch.cat([w[f"{at}mlp.gate_proj.weight"], w[f"{at}mlp.up_proj.weight"]])
        x = linear(swiglu(linear(h, gate_up)), w[f"{at}mlp.down_proj.weight"], segments=segments)
    h, _ = _norm(x, residual, w["model.norm.weight"], eps)
    return matmul_f32(h, w.get("lm_head.weight", w["model.embed_tokens.weight"]))


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if residual is None:
        return rms_norm(x, weight, eps), x
    return add_rms_norm(x, residual, weight, eps)
