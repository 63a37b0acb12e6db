"""Which module of a vLLM model plays which part: its group, its boundary. What is not listed is not covered."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


class NotCovered(ValueError):
    """The model has a part that no samebits boundary computes. The message names it."""


@dataclass(frozen=True)
class Place:
    """A part of the model: names that match `pattern` belong to `group` and are computed by `boundary`."""

    pattern: str
    group: str
    boundary: str


ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")

_LAYER = r"model\.layers\.\d+"
PLACES = (
    # Copied rows are the same on every route; they feed the first norm, so they travel with its group.
    Place(r"model\.embed_tokens", "attention", "embedding"),
    Place(rf"{_LAYER}\.input_layernorm", "attention", "rms_norm"),
    Place(rf"{_LAYER}\.self_attn\.qkv_proj", "attention", "linear"),
    Place(rf"{_LAYER}\.self_attn\.[qk]_norm", "attention", "rms_norm"),
    Place(rf"{_LAYER}\.self_attn\.rotary_emb", "attention", "rotary"),
    Place(rf"{_LAYER}\.self_attn\.attn", "attention", "attention"),
    Place(rf"{_LAYER}\.self_attn\.o_proj", "attention", "linear"),
    Place(rf"{_LAYER}\.post_attention_layernorm", "ffn", "rms_norm"),
    Place(rf"{_LAYER}\.mlp\.gate_up_proj", "ffn", "linear"),
    Place(rf"{_LAYER}\.mlp\.act_fn", "ffn", "swiglu"),
    Place(rf"{_LAYER}\.mlp\.down_proj", "ffn", "linear"),
    Place(r"model\.norm", "logp", "rms_norm"),
    Place(r"lm_head", "logp", "linear"),
    Place(r"logits_processor", "logp", "linear"),
)
# Modules that only hold others, and one that vLLM builds inside its rotary embedding for other callers.
_HOLDERS = re.compile(rf"|model|model\.layers|{_LAYER}(\.self_attn|\.mlp|\.self_attn\.rotary_emb\.apply_rotary_emb)?")
SAMPLER = Place("sampler", "logp", "logprob")


def places_of(names: Iterable[str]) -> dict[str, Place]:
    """Module name -> place, in the order of the names. Raises NotCovered for a name that has none."""
    found: dict[str, Place] = {}
    for name in names:
        place = next((p for p in PLACES if re.fullmatch(p.pattern, name)), None)
        if place is not None:
            found[name] = place
        elif not _HOLDERS.fullmatch(name):
            raise NotCovered(
                f"module {name!r} is no part of a dense Qwen3, Qwen2 or Llama model: no boundary covers it"
            )
    return found
