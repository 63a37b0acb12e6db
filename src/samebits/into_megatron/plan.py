"""Which parallel layouts of a trainer can serve a model: decided from sizes alone, before any process starts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from samebits.into_megatron.model import ModelShape


@dataclass(frozen=True, kw_only=True)
class TrainLayout:
    """The parallel sizes of a trainer."""

    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1

    def __str__(self) -> str:
        sizes = [f"{name} {getattr(self, name)}" for name in ("tp", "cp", "pp", "vpp", "dp")]
        return ", ".join([*sizes, *(["sequence parallel"] if self.sequence_parallel else [])])


def plan(layout: TrainLayout, shape: ModelShape, max_tp: int, strict_gradients: bool = False) -> None:
    """Raise ValueError with the rule that `layout` breaks for `shape`, and the nearest layout that works.

    `max_tp` is the number of K segments of row-parallel layers, the largest tensor parallelism of either side; with
    `strict_gradients` an input gradient's sum over columns is cut into as many parts.
    """
    columns = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    if strict_gradients and columns % max_tp:
        raise ValueError(
            f"strict_gradients: {columns} columns of query, key and value do not divide by max_tp {max_tp}; "
            "choose a smaller max_tp, or leave strict_gradients out"
        )
    broken = next(broken_rules(layout, shape, max_tp), None)
    if broken is not None:
        near = nearest(layout, shape, max_tp)
        raise ValueError(f"{broken}; the nearest layout that works: {near if near else 'none with this max_tp'}")


def broken_rules(layout: TrainLayout, shape: ModelShape, max_tp: int) -> Iterator[str]:
    """Every rule that `layout` breaks, in words."""
    for name, size in (("tp", layout.tp), ("cp", layout.cp), ("pp", layout.pp), ("dp", layout.dp), ("max_tp", max_tp)):
        if size < 1 or size & (size - 1):
            yield f"{name} {size} is not a power of two: the tree over ranks must be balanced"
    if max_tp % layout.tp:
        yield f"max_tp {max_tp} is not a multiple of tp {layout.tp}: a rank must hold whole K segments"
    if layout.sequence_parallel and layout.tp == 1:
        yield "sequence parallelism splits rows over tensor-parallel ranks: it needs tp > 1"
    if layout.vpp > 1 and layout.pp == 1:
        yield "virtual stages interleave the chunks of pipeline ranks: vpp > 1 needs pp > 1"
    few = min(shape.kv_heads, layout.tp)
    for what, size, parts in (
        ("attention: query heads", shape.heads, layout.tp),
        ("attention: key/value heads", shape.kv_heads, few),
        ("attention: tensor-parallel ranks over few key/value heads", layout.tp, few),
        ("ffn: intermediate size", shape.ffn, layout.tp),
        ("linear: K of the output projection", shape.heads * shape.head_dim, max_tp),
        ("linear: K of the down projection", shape.ffn, max_tp),
        ("pipeline: layers over pp * vpp chunks", shape.layers, layout.pp * layout.vpp),
    ):
        if size % parts:
            yield f"{what} ({size}) does not divide by {parts}"


def nearest(layout: TrainLayout, shape: ModelShape, max_tp: int) -> TrainLayout | None:
    """The layout with no size above the wanted one that works and is closest to it, counted in halvings."""
    found = [candidate for candidate in _smaller(layout) if next(broken_rules(candidate, shape, max_tp), None) is None]
    return min(found, key=lambda candidate: _distance(candidate, layout), default=None)


def _smaller(layout: TrainLayout) -> Iterator[TrainLayout]:
    tps, cps, pps, dps = (_powers_of_two(size) for size in (layout.tp, layout.cp, layout.pp, layout.dp))
    for tp, cp, pp, vpp, dp in itertools.product(tps, cps, pps, range(1, max(1, layout.vpp) + 1), dps):
        sequence_parallel = layout.sequence_parallel and tp > 1
        yield TrainLayout(tp=tp, sequence_parallel=sequence_parallel, cp=cp, pp=pp, vpp=vpp, dp=dp)


def _powers_of_two(largest: int) -> list[int]:
    return [1 << power for power in range(max(1, largest).bit_length())]


def _distance(candidate: TrainLayout, wanted: TrainLayout) -> tuple[float, bool]:
    pairs = [(getattr(candidate, name), max(1, getattr(wanted, name))) for name in ("tp", "cp", "pp", "vpp", "dp")]
    halvings = sum(math.log2(want / have) for have, want in pairs)
    return halvings, candidate.sequence_parallel != wanted.sequence_parallel
