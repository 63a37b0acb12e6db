"""Everything about the located site and token: both sides' rows, weights and constants, and what the contract gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samebits.bits import first_difference
from samebits.locate.model import Decoder
from samebits.locate.recompute import recompute
from samebits.locate.values import RowDifference, compare_rows, tensor_of
from samebits.trace import Point, SideTrace, Site, Token
from samebits.trace.points import POSITIONS, TARGETS, TEMPERATURE

_CACHED = ("keys", "values")


@dataclass(frozen=True)
class SideSample:
    """One side: rows read and written by name, parameters by the end of their names."""

    reads: dict[str, Tensor]
    writes: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class SiteSample:
    """The site at one token, on both sides. `constants` are the decoder's."""

    site: Site
    token: Token
    trainer: SideSample
    rollout: SideSample
    constants: dict[str, Any]
    differences: tuple[RowDifference, ...] = field(default=())

    def gives_the_contract(self, side: SideSample) -> bool | None:
        """Whether what a side wrote is what the contract's op makes of what it read; None where that is unknown."""
        if self.site.boundary == "copy" or not side.writes:
            return None
        reads = side.reads if len(side.reads) >= len(self.trainer.reads) else self.trainer.reads
        try:
            wanted = recompute(self.site.name, reads, side.weights, self.constants)
        except ValueError:
            return None
        return all(
            row.dtype == wanted[name].dtype and first_difference(row, wanted[name]) is None
            for name, row in side.writes.items()
        )


def kept_points(site: Site) -> list[Point]:
    """The points whose rows a sample of this site needs."""
    return [*site.reads, *site.writes]


def take_sample(
    site: Site,
    token: Token,
    trainer: SideTrace,
    rollout: SideTrace,
    weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    decoder: Decoder,
) -> SiteSample:
    """From traces that kept this site's points; `weights` are its parameters, the trainer's and the rollout's."""
    sides = [
        SideSample(
            reads=_reads(site, token, trace),
            writes={point.name: _row(trace, point, token) for point in site.writes if token in trace.rows[point]},
            weights={".".join(name.split(".")[-2:]): tensor for name, tensor in held.items()},
        )
        for trace, held in zip((trainer, rollout), weights, strict=True)
    ]
    differences = []
    for point in site.writes:
        left, right = (_places(trace, point, token) for trace in (trainer, rollout))
        if trainer.dtypes.get(point) == rollout.dtypes.get(point):
            found = [
                compare_rows(_label(point, at, token), trainer.dtypes[point], left[at], right[at])
                for at in sorted(left.keys() & right.keys())
            ]
            differences += [difference for difference in found if difference is not None]
    names = ("heads", "kv_heads", "head_dim", "eps", "base", "max_positions", "segments")
    return SiteSample(
        site=site,
        token=token,
        trainer=sides[0],
        rollout=sides[1],
        constants={name: getattr(decoder, name) for name in names},
        differences=tuple(differences),
    )


def _label(point: Point, at: int, token: Token) -> str:
    return point.name if at == token.index else f"{point.name} at position {at}"


def _places(trace: SideTrace, point: Point, token: Token) -> dict[int, Any]:
    """Rows of a point that belong to the token: one, or those of all positions that it attends to."""
    if point.name in _CACHED:
        rows = trace.rows.get(Point(point.layer, f"{point.name}_rows"), {})
        return {one.index: row for one, row in rows.items() if one.sequence == token.sequence}
    row = trace.rows.get(point, {}).get(token)
    return {} if row is None else {token.index: row}


def _reads(site: Site, token: Token, trace: SideTrace) -> dict[str, Tensor]:
    reads: dict[str, Tensor] = {}
    for point in site.reads:
        if point.name in _CACHED:
            rows = _places(trace, point, token)
            if all(at in rows for at in range(token.index + 1)):
                held = [tensor_of(rows[at], trace.dtypes[point]) for at in range(token.index + 1)]
                reads[point.name] = torch.stack(held)
        elif token in trace.rows.get(point, {}):
            reads[point.name] = _row(trace, point, token)
    asked = {"rotary": (POSITIONS,), "logprob": (TARGETS, TEMPERATURE)}.get(site.boundary, ())
    for point in asked:
        if token in trace.rows.get(point, {}):
            reads[point.name] = _row(trace, point, token)
    return reads


def _row(trace: SideTrace, point: Point, token: Token) -> Tensor:
    return tensor_of(trace.rows[point][token], trace.dtypes[point])
