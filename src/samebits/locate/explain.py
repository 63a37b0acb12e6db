"""What sort of difference it is: an operator's, or one of inputs, weights or settings, which none is to blame for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from samebits.bits import raw
from samebits.locate.result import Kind
from samebits.locate.sample import SiteSample
from samebits.locate.search import Divergence
from samebits.locate.values import are_bf16_values, tensor_of
from samebits.locate.weights import stem
from samebits.trace import Point, SideTrace, Site, TracedSequence
from samebits.trace.points import IDS, POSITIONS, TARGETS, TEMPERATURE

Facts = Mapping[str, Mapping[str, Any]]
# Boundary -> what a side was asked for there: the kind of a difference, the point that holds it, its name.
_ASKED: dict[str, tuple[tuple[Kind, Point, str], ...]] = {
    "embedding": (("input ids", IDS, "token id"),),
    "rotary": (("position ids", POSITIONS, "position id"),),
    "logprob": (("target ids", TARGETS, "scored token"), ("temperature", TEMPERATURE, "temperature")),
}


def facts_of(facts: Facts, site: Site) -> Mapping[str, Any]:
    """What one side says about a site."""
    unknown = {"route": "?", "implementation": "unknown", "parameters": {}}
    return facts.get(f"{site.layer} {site.name}") or facts.get(f"-1 {site.name}") or unknown


def kind_of(
    found: Divergence,
    trainer: SideTrace,
    rollout: SideTrace,
    wrong_weights: Sequence[str],
    facts: tuple[Facts, Facts],
    sequence: TracedSequence,
) -> tuple[Kind, str]:
    """The kind, and a sentence with the values of both sides (trainer first)."""
    site, token = found.site, found.token
    for kind, point, what in _ASKED.get(site.boundary, ()):
        left, right = (_shown(side, point, found) for side in (trainer, rollout))
        if left != right:
            wanted = {IDS: sequence.token_ids[token.index], POSITIONS: token.index}.get(point)
            right_one = "" if wanted is None else f"; it should be {wanted}"
            return kind, f"the {what} is {left} on the trainer and {right} on the rollout side{right_one}"
    stems = {stem(name) for name in wrong_weights}
    held = [name for name in wrong_weights if stem(name) in site.weights]
    if stems & set(site.weights):
        return "weights", f"the two sides hold other values of {', '.join(held)}"
    dtypes = {point: (trainer.dtypes[point], rollout.dtypes[point]) for point in found.points}
    for point, (left_type, right_type) in dtypes.items():
        if left_type != right_type:
            return "dtype", f"{point.name} is {left_type} on the trainer and {right_type} on the rollout side"
    differing = parameter_differences(*(facts_of(side, site)["parameters"] for side in facts))
    if differing:
        text = ", ".join(
            f"{name} is {left} on the trainer and {right} on the rollout side" for name, left, right in differing
        )
        return "parameter", text
    if len(found.region) > 1:
        return "region", "one side could not be looked into here; the cause is one of " + ", ".join(
            map(str, found.region)
        )
    if site.boundary == "copy":
        return "KV cache", "attention reads other keys or values than those that were computed"
    return "operator", "inputs, weights and settings agree, what comes out differs"


def _shown(side: SideTrace, point: Point, found: Divergence) -> object:
    row = side.rows.get(point, {}).get(found.token)
    return None if row is None else tensor_of(row, side.dtypes[point])[0].item()


def parameter_differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, left, right) of the constants that both sides name and that differ."""
    return [(name, left[name], right[name]) for name in sorted(left.keys() & right.keys()) if left[name] != right[name]]


def hints_of(sample: SiteSample, trainer: SideTrace, rollout: SideTrace) -> list[str]:
    """What else can be seen in the values."""
    hints: list[str] = []
    # position 0 is turned by no angle
    copies = sample.site.boundary == "copy" or (sample.site.boundary == "rotary" and sample.token.index == 0)
    for name, side in (("trainer", sample.trainer), ("rollout side", sample.rollout)):
        reads = {key: row for key, row in side.reads.items() if row.dim() == 1}
        for written, row in side.writes.items():
            same = [key for key, other in reads.items() if other.dtype == row.dtype and _equal(row, other)]
            if same and not copies:
                hints.append(f"on the {name}, {written} is {same[0]} unchanged: nothing was computed there")
            if row.dtype == torch.float32 and row.numel() > 8 and are_bf16_values(raw(row).numpy()):
                hints.append(f"on the {name}, every value of {written} is a bfloat16 value: it was rounded to that")
    hints += _swapped(sample)
    if sample.site.boundary == "copy":
        hints += _misplaced(sample, trainer, rollout)
    return hints


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bool((raw(left) == raw(right)).all())


def _swapped(sample: SiteSample) -> list[str]:
    left, right = sample.trainer.writes, sample.rollout.writes
    if {"gate", "up"} <= left.keys() & right.keys() and _equal(left["gate"], right["up"]):
        return ["gate on the trainer is up on the rollout side: the two are swapped"]
    return []


def _misplaced(sample: SiteSample, trainer: SideTrace, rollout: SideTrace) -> list[str]:
    """Keys that a side reads at a position where another position's were written."""
    layer, sequence = sample.site.layer, sample.token.sequence
    hints = []
    for name, side in (("trainer", trainer), ("rollout side", rollout)):
        written = {
            row.tobytes(): token.index
            for token, row in side.rows.get(Point(layer, "k_turned"), {}).items()
            if token.sequence == sequence
        }
        read = {
            token.index: row
            for token, row in side.rows.get(Point(layer, "keys_rows"), {}).items()
            if token.sequence == sequence
        }
        wrong = [at for at in sorted(read) if written.get(read[at].tobytes(), -1) != at]
        if wrong:
            source = written.get(read[wrong[0]].tobytes())
            what = "no key of this sequence" if source is None else f"the key of position {source}"
            hints.append(
                f"the {name} reads {what} at position {wrong[0]} ({len(wrong)} of {len(read)} positions are wrong)"
            )
    return hints
