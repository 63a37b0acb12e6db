"""What a model directory says about the shape of its decoder, as far as localisation needs it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from samebits.trace import Site, sites


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Sizes and constants of a dense decoder. `segments` are the K segments of its row-parallel layers."""

    layers: int
    hidden: int
    ffn: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    base: float
    max_positions: int
    qk_norm: bool
    tied: bool
    segments: int

    @classmethod
    def read(cls, model: Path, segments: int) -> Decoder:
        """From a model directory's config.json. Raises ValueError when it is missing or lacks an entry."""
        file = model / "config.json"
        try:
            shape = json.loads(file.read_text(encoding="utf-8"))
            heads = int(shape["num_attention_heads"])
            rope = shape.get("rope_parameters") or {}
            return cls(
                layers=int(shape["num_hidden_layers"]),
                hidden=int(shape["hidden_size"]),
                ffn=int(shape["intermediate_size"]),
                vocab=int(shape["vocab_size"]),
                heads=heads,
                kv_heads=int(shape.get("num_key_value_heads") or heads),
                head_dim=int(shape.get("head_dim") or shape["hidden_size"] // heads),
                eps=float(shape["rms_norm_eps"]),
                base=float(rope.get("rope_theta", shape.get("rope_theta"))),
                max_positions=int(shape["max_position_embeddings"]),
                qk_norm=shape["architectures"] == ["Qwen3ForCausalLM"],
                tied=bool(shape.get("tie_word_embeddings", False)),
                segments=segments,
            )
        except (OSError, KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise ValueError(f"{file}: no configuration of a dense decoder: {error!r}") from error

    def check_sizes(self, other: Decoder) -> None:
        """Raise ValueError naming the first size in which two decoders differ: their values can't be compared then."""
        for name in ("layers", "hidden", "ffn", "vocab", "heads", "kv_heads", "head_dim"):
            left, right = getattr(self, name), getattr(other, name)
            if left != right:
                raise ValueError(
                    f"the trainer's model has {name} {left}, the rollout side's {right}: nothing to compare"
                )

    def sites(self) -> list[Site]:
        """Every site of this decoder, in model order."""
        return sites(self.layers, qk_norm=self.qk_norm, tied=self.tied)
