"""Tiny random models as Hugging Face directories, and requests for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from samebits.timeline.types import GenerateRequest, SampleKey

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def make_model(path: Path, seed: int = 0, **changes: Any) -> Path:
    """A random model with perturbed norms and, where the configuration asks for them, biases."""
    config = {**QWEN3, **changes}
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(random_weights(config, seed), path / "model.safetensors")
    return path


def random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Weights under Hugging Face names, bf16."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float, shift: float = 0.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale + shift).bfloat16()

    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    weights = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden, scale=0.5),
        "model.norm.weight": normal(hidden, scale=0.2, shift=1.0),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden, scale=0.3)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        for name, shape in shapes.items():
            weights[f"{at}{name}.weight"] = normal(*shape, scale=1.5 / shape[1] ** 0.5)
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if config["model_type"] == "qwen3":
            norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
        for name, width in norms.items():
            weights[f"{at}{name}.weight"] = normal(width, scale=0.2, shift=1.0)
        if config["model_type"] == "qwen2" or config["attention_bias"]:
            for name, width in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
                weights[f"{at}self_attn.{name}.bias"] = normal(width, scale=0.2)
    return weights


def make_requests(
    count: int, tokens: int, temperature: float = 1.0, prompt: int = 40, step: int = 0
) -> list[GenerateRequest]:
    """Requests with prompts of different lengths that share a long prefix, and a seed each."""
    shared = [3 + i * 7 % 190 for i in range(prompt)]
    return [
        GenerateRequest(
            key=SampleKey(step, index, 0),
            prompt_ids=(*shared, *range(3, 4 + index % 9)),
            seed=(1 << 63) + 977 * index,
            max_tokens=tokens,
            temperature=temperature,
            stop_ids=(),
        )
        for index in range(count)
    ]
