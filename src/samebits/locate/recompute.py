"""One boundary for one token by the contract's own op, from recorded inputs: what both sides should have written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from samebits.ops.attention import attention
from samebits.ops.linear import linear, matmul_f32
from samebits.ops.logprob import logprob
from samebits.ops.rms_norm import rms_norm
from samebits.ops.rotary import rotary, rotary_table
from samebits.ops.swiglu import swiglu

Tensors = Mapping[str, Tensor]
_ROW_PARALLEL = ("output projection", "down projection")
_HEADS = {"q norm": "heads", "k norm": "kv_heads"}


def recompute(site: str, inputs: Tensors, weights: Tensors, constants: Mapping[str, Any]) -> dict[str, Tensor]:
    """Point -> the row [width] that the site named `site` writes for one token.

    `inputs` are its points' rows [width] (of `keys` and `values` all rows up to the token's own), `weights` its
    parameters under the last part of their Hugging Face names, `constants` those of `Decoder`. Raises ValueError for a
    site whose contract is no arithmetic (the KV cache, which is a copy).
    """
    return {name: row.reshape(-1) for name, row in _compute(site, inputs, weights, constants).items()}


def _compute(site: str, inputs: Tensors, weights: Tensors, constants: Mapping[str, Any]) -> dict[str, Tensor]:
    (first, *others) = inputs.values()
    match site:
        case "embedding":
            return {"stream": weights["embed_tokens.weight"][int(first)]}
        case "input norm" | "MLP norm" | "final norm" | "q norm" | "k norm":
            return {_normed(site): _norm(site, first, weights, constants)}
        case "output projection" | "down projection" | "qkv projection" | "gate/up projection":
            return _project(site, first, weights, constants)
        case "LM head":
            (weight,) = weights.values()
            return {"logits": matmul_f32(first[None], weight)}
        case "rotary":
            return _turn(first, others[0], int(inputs["positions"]), constants)
        case "attention":
            return {"mixed": _attend(inputs, constants)}
        case "attention residual" | "MLP residual":
            return {"stream_mid" if site.startswith("att") else "stream": first + others[0]}
        case "SwiGLU":
            return {"activated": swiglu(torch.cat([first, others[0]])[None])}
        case "log-probability":
            target = inputs["targets"].reshape(1).long()
            return {"logp": logprob(first[None].float(), target, float(inputs["temperature"]))}
    raise ValueError(f"locate: {site!r} is not computed by arithmetic")


def _normed(site: str) -> str:
    names = {"MLP norm": "ffn_normed", "q norm": "q_normed", "k norm": "k_normed"}
    return names.get(site, "normed")


def _norm(site: str, x: Tensor, weights: Tensors, constants: Mapping[str, Any]) -> Tensor:
    (weight,) = weights.values()
    rows = x.view(constants[_HEADS[site]], -1) if site in _HEADS else x[None]
    return rms_norm(rows, weight, constants["eps"])


def _project(site: str, x: Tensor, weights: Tensors, constants: Mapping[str, Any]) -> dict[str, Tensor]:
    segments = constants["segments"] if site in _ROW_PARALLEL else 1
    names = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "gate_proj": "gate", "up_proj": "up"}
    names |= {"o_proj": "attn_out", "down_proj": "ffn_out"}
    return {
        names[name.partition(".")[0]]: linear(
            x[None], weight, weights.get(name.replace(".weight", ".bias")), segments=segments
        )
        for name, weight in weights.items()
        if name.endswith(".weight")
    }


def _turn(q: Tensor, k: Tensor, position: int, constants: Mapping[str, Any]) -> dict[str, Tensor]:
    table = rotary_table(constants["head_dim"], constants["base"], constants["max_positions"])
    where = torch.tensor([position])
    dim = constants["head_dim"]
    return {
        "q_turned": rotary(q.view(1, -1, dim), where, *table),
        "k_turned": rotary(k.view(1, -1, dim), where, *table),
    }


def _attend(inputs: Tensors, constants: Mapping[str, Any]) -> Tensor:
    """The last row of a sequence: a query over all keys up to its own."""
    dim, keys = constants["head_dim"], inputs["keys"]
    length = keys.shape[0]
    return attention(
        inputs["q_turned"].view(1, -1, dim),
        keys.view(length, -1, dim),
        inputs["values"].view(length, -1, dim),
        torch.tensor([0, length], dtype=torch.int32),
        dim**-0.5,
        q_positions=torch.tensor([length - 1], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
    )
