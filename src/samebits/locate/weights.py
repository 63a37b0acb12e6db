"""Do both sides hold the same weights? Compared by digest, part by part; values only where a part differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from samebits.bits import raw, tree_digest
from samebits.locate.values import RowDifference, compare_rows
from samebits.timeline.types import ShardDigest
from samebits.trace import Site


@dataclass(frozen=True, kw_only=True)
class WeightDifference:
    """One parameter that differs: its Hugging Face name, its first differing element, the difference of its values."""

    name: str
    index: tuple[int, ...]
    values: RowDifference


def differing_weights(trainer: Mapping[str, torch.Tensor], rollout: Iterable[ShardDigest]) -> list[str]:
    """Names of the parameters of which some engine part is not the trainer's, or that one side lacks, sorted."""
    wrong, seen = set(), set()
    for shard in rollout:
        seen.add(shard.name)
        whole = trainer.get(shard.name)
        if whole is None or shard.stop > whole.shape[shard.dim]:
            wrong.add(shard.name)
            continue
        part = whole.narrow(shard.dim, shard.start, shard.stop - shard.start)
        if tree_digest(part) != shard.digest:
            wrong.add(shard.name)
    return sorted(wrong | (set(trainer) - seen))


def in_model_order(names: Iterable[str], order: Sequence[Site]) -> list[str]:
    """Parameter names as a token meets them."""
    place = {name: at for at, site in enumerate(order) for name in site.weights}
    return sorted(names, key=lambda name: (place.get(stem(name), len(order)), name))


def stem(name: str) -> str:
    """The module of a parameter: its name without `.weight` or `.bias`."""
    return name.rpartition(".")[0]


def weight_difference(
    name: str, trainer: torch.Tensor, parts: Sequence[tuple[int, int, np.ndarray[Any, Any]]]
) -> WeightDifference | None:
    """Where the trainer's tensor and the engine's parts (dim, first row, bits) of it differ; None where nowhere."""
    whole = trainer.to(torch.bfloat16)
    held = raw(whole).numpy().copy()
    for dim, start, bits in parts:
        if held.ndim != bits.ndim or start + bits.shape[dim] > held.shape[dim]:
            return None
        place = [slice(None)] * held.ndim
        place[dim] = slice(start, start + bits.shape[dim])
        held[tuple(place)] = bits
    values = compare_rows(name, "bfloat16", raw(whole).numpy().reshape(-1), held.reshape(-1))
    if values is None:
        return None
    index = tuple(int(i) for i in np.unravel_index(values.first.column, held.shape))
    return WeightDifference(name=name, index=index, values=values)
