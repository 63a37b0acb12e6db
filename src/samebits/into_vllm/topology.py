"""Which engines can serve a model, by tensor-parallel size and memory: decided from sizes alone, before any starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from samebits.into_vllm.config import EngineConfig

_SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "max_position_embeddings",
)


def check_rollout_layout(config: Mapping[str, Any], tp: int, max_tp: int) -> None:
    """Raise ValueError with the rule that an engine of `tp` workers breaks, and the nearest size that works.

    `config` is the model's config.json, in which a size that is none is refused, too. `max_tp` is the number of K
    segments of row-parallel layers, the largest tensor parallelism of either side.
    """
    for name in _SIZES:
        size = config.get(name)
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"config.json: {name} must be a positive integer, got {size!r}")
    broken = next(broken_rules(config, tp, max_tp), None)
    if broken is None:
        return
    smaller = (size for size in range(tp - 1, 0, -1) if next(broken_rules(config, size, max_tp), None) is None)
    near = next(smaller, None)
    hint = f"the nearest that works: {near}" if near else f"none works with max_tp {max_tp}"
    raise ValueError(f"rollout_tp {tp}: {broken}; {hint}")


def broken_rules(config: Mapping[str, Any], tp: int, max_tp: int) -> Iterator[str]:
    """Every rule that an engine of `tp` workers breaks, in words."""
    heads, ffn = config.get("num_attention_heads"), config.get("intermediate_size")
    if not heads or not ffn:
        return  # another kind of model, which is refused by its name
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    for name, size in (("the number of workers", tp), ("max_tp", max_tp)):
        if size < 1 or size & (size - 1):
            yield f"{name} ({size}) is not a power of two: the tree over ranks must be balanced"
    if max_tp % tp:
        yield f"max_tp ({max_tp}) does not divide by {tp}: a worker must hold whole K segments"
    # Fewer key/value heads than workers: each head is held by several, whole.
    few = min(kv_heads, tp)
    for what, size, parts in (
        ("attention: query heads", heads, tp),
        ("attention: key/value heads", kv_heads, few),
        ("attention: workers over few key/value heads", tp, few),
        ("ffn: intermediate size", ffn, tp),
        ("linear: K of the output projection", heads * head_dim, max_tp),
        ("linear: K of the down projection", ffn, max_tp),
    ):
        if size % parts:
            yield f"{what} ({size}) does not divide by {parts}"


def check_cache(config: Mapping[str, Any], tp: int, length: int, gib: float) -> None:
    """Raise ValueError where keys and values of one sequence of `length` tokens need more than a worker's `gib` GiB."""
    heads, layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    if not heads or not layers:
        return  # another kind of model, which is refused by its name
    kv_heads = max(1, (config.get("num_key_value_heads") or heads) // tp)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    blocks = math.ceil(length / EngineConfig.block_size) + 1  # one is vLLM's own
    per_token = 2 * layers * kv_heads * head_dim * 2  # keys and values, two bytes each
    needed = blocks * EngineConfig.block_size * per_token / 2**30
    if needed > gib:
        raise ValueError(
            f"kv_cache_gib {gib}: one sequence of max_prompt_length + max_response_length = {length} tokens needs "
            f"{math.ceil(needed * 1000) / 1000:g} of each engine worker, and samples that run together as much each; "
            "raise it, or lower the lengths"
        )
