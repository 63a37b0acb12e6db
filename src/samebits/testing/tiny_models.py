"""Small random checkpoints in Hugging Face form, one per served architecture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
}


def write_tiny_model(directory: Path, architecture: str = "Qwen3ForCausalLM", seed: int = 0, **changes: Any) -> Path:
    """A random model of `architecture` under `directory`; `changes` override entries of its config.json.

    Norm weights are not 1, biases are not 0, and values are large enough that every operator shows in the output.
    """
    config = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        **SIZES,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **changes,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config):
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            values = 1.0 + 0.2 * values
        elif name.endswith(".bias"):
            values = 0.5 * values
        elif "embed_tokens" not in name:
            values = values * (1.5 / shape[-1] ** 0.5)
        tensors[name] = values.to(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a checkpoint with this configuration has."""
    architecture = config["architectures"][0]
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield f"{at}input_layernorm.weight", (hidden,)
        for which, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{at}self_attn.{which}_proj.weight", (rows, hidden)
            if architecture == "Qwen2ForCausalLM":
                yield f"{at}self_attn.{which}_proj.bias", (rows,)
        yield f"{at}self_attn.o_proj.weight", (hidden, queries)
        if architecture == "Qwen3ForCausalLM":
            yield f"{at}self_attn.q_norm.weight", (head_dim,)
            yield f"{at}self_attn.k_norm.weight", (head_dim,)
        yield f"{at}post_attention_layernorm.weight", (hidden,)
        yield f"{at}mlp.gate_proj.weight", (ffn, hidden)
        yield f"{at}mlp.up_proj.weight", (ffn, hidden)
        yield f"{at}mlp.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
