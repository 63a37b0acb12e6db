"""From a Hugging Face configuration to the shape that we serve; `building` makes Megatron's configuration of it.

A feature that no boundary of the contract covers is refused here, by the name of the boundary it belongs to.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder: sizes and the few switches that the served architectures differ in."""

    architecture: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    rope_base: float
    max_positions: int
    qk_norm: bool
    qkv_bias: bool
    tied: bool

    vocab_multiple: int = 1

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary rows after padding to a multiple of `vocab_multiple` that `tp` ranks can share equally."""
        multiple = math.lcm(tp, self.vocab_multiple)
        return -(-self.vocab // multiple) * multiple


def read_config(path: str | Path) -> dict[str, Any]:
    """The parsed `config.json` of a model directory; ValueError when it is missing or not a JSON object."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"{path}: no config.json here; expected a Hugging Face model directory")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(config).__name__}")
    return config


def read_shape(path: str | Path) -> ModelShape:
    """The shape of the model in directory `path`; ValueError names the boundary of what is not served."""
    return shape_of(read_config(path), str(path))


def shape_of(config: dict[str, Any], where: str) -> ModelShape:
    """The shape that a parsed Hugging Face configuration describes; `where` is named in errors."""
    architectures = config.get("architectures")
    if architectures not in [[name] for name in ARCHITECTURES]:
        raise ValueError(f"{where}: architecture {architectures} is not served; served: {', '.join(ARCHITECTURES)}")
    (architecture,) = architectures
    for boundary, reason in _refusals(config, architecture):
        raise ValueError(f"{where}: {boundary}: {reason}")
    sizes = {key: _positive_int(config, key, where) for key in _SIZES}
    heads = sizes["num_attention_heads"]
    kv_heads, head_dim = (
        default if config.get(key) is None else _positive_int(config, key, where)
        for key, default in (("num_key_value_heads", heads), ("head_dim", sizes["hidden_size"] // heads))
    )
    if heads % kv_heads:
        raise ValueError(f"{where}: attention: {heads} query heads do not divide by {kv_heads} key/value heads")
    return ModelShape(
        architecture=architecture,
        layers=sizes["num_hidden_layers"],
        hidden=sizes["hidden_size"],
        ffn=sizes["intermediate_size"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=sizes["vocab_size"],
        eps=_positive_number(config, "rms_norm_eps", where),
        rope_base=_rope_base(config, where),
        max_positions=sizes["max_position_embeddings"],
        qk_norm=architecture == "Qwen3ForCausalLM",
        qkv_bias=architecture == "Qwen2ForCausalLM",
        tied=bool(config.get("tie_word_embeddings", False)),
    )


_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


def _positive_int(config: dict[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: {key} must be a positive integer, got {value!r}")
    return value


def _positive_number(config: dict[str, Any], key: str, where: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"{where}: {key} must be a positive number, got {value!r}")
    return float(value)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rotary: rope_parameters and rope_scaling must be objects, got {rope!r}")
    return rope


def _rope_base(config: dict[str, Any], where: str) -> float:
    base = _rope(config).get("rope_theta", config.get("rope_theta"))
    if base is None:
        raise ValueError(f"{where}: rotary: rope_theta is missing")
    return _positive_number({"rope_theta": base}, "rope_theta", where)


def _refusals(config: dict[str, Any], architecture: str) -> list[tuple[str, str]]:
    """Every feature of the configuration that no boundary covers, as (boundary, reason)."""
    rope = _rope(config)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    layer_types = config.get("layer_types") or ["full_attention"]
    full_attention = isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)
    experts = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)]
    checks = (
        ("ffn", bool(experts), f"mixture of experts ({', '.join(experts)}) is not served"),
        ("ffn", config.get("hidden_act", "silu") != "silu", f"hidden_act {config.get('hidden_act')!r} is not silu"),
        ("ffn", bool(config.get("mlp_bias")), "mlp_bias is not served"),
        (
            "attention",
            bool(config.get("attention_bias")),
            "attention_bias puts a bias on the output projection, which is not served",
        ),
        (
            "attention",
            bool(config.get("use_sliding_window")) or not full_attention,
            "sliding-window attention is not served",
        ),
        ("attention", bool(config.get("attention_dropout")), "attention dropout is not served"),
        ("rotary", rope_type not in ("default", None), f"rope scaling of type {rope_type!r} is not served"),
        (
            "rotary",
            (config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0) != 1.0,
            "partial rotary embedding is not served",
        ),
        ("linear", bool(config.get("quantization_config")), "quantised weights are not served"),
        ("linear", config.get("pretraining_tp", 1) not in (1, None), "pretraining_tp splits the sums; not served"),
    )
    return [(boundary, reason) for boundary, refused, reason in checks if refused]
