"""One side's trace, whatever its layout: the entries of all ranks and passes, put together token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from samebits.trace.points import Point
from samebits.trace.recorder import Entry

_MASK = (1 << 64) - 1


@dataclass(frozen=True, order=True, slots=True)
class Token:
    """One token of one sequence: the number of the sequence, the index of the token in it."""

    sequence: int
    index: int


@dataclass(frozen=True)
class TracedSequence:
    """A sequence that both sides compute: its name, all its token ids, how many of them are the prompt."""

    name: str
    token_ids: tuple[int, ...]
    prompt_length: int
    temperature: float = 1.0


@dataclass
class SideTrace:
    """Digests (unsigned 64-bit) and, where kept, whole rows as integers, per point and token.

    `conflicts` names what ranks of this side that hold the same columns disagree about.
    """

    dtypes: dict[Point, str] = field(default_factory=dict)
    widths: dict[Point, int] = field(default_factory=dict)
    digests: dict[Point, dict[Token, int]] = field(default_factory=dict)
    rows: dict[Point, dict[Token, np.ndarray[Any, Any]]] = field(default_factory=dict)
    conflicts: list[tuple[Point, Token]] = field(default_factory=list)


def assemble(ranks: Sequence[Iterable[Entry]]) -> SideTrace:
    """One side's trace from the entries of its ranks. A token that was computed twice keeps its last pass."""
    side = SideTrace()
    parts: dict[Point, dict[int, dict[Token, tuple[int, Any]]]] = {}
    for entries in ranks:
        own: dict[tuple[Point, int], dict[Token, tuple[int, Any]]] = {}
        for entry in entries:
            point = Point(*entry.point)
            side.dtypes[point] = entry.dtype
            side.widths[point] = entry.whole
            _collect(own.setdefault((point, entry.start), {}), entry)
        for (point, start), tokens in own.items():
            _merge(side, point, parts.setdefault(point, {}).setdefault(start, {}), tokens)
    for point, by_start in parts.items():
        _join(side, point, by_start)
    return side


def _collect(found: dict[Token, tuple[int, Any]], entry: Entry) -> None:
    tokens = zip(entry.sequence.tolist(), entry.index.tolist(), entry.digests.tolist(), strict=True)
    for at, (sequence, index, digest) in enumerate(tokens):
        found[Token(sequence, index)] = (digest & _MASK, None if entry.bits is None else entry.bits[at])


def _merge(
    side: SideTrace, point: Point, known: dict[Token, tuple[int, Any]], new: dict[Token, tuple[int, Any]]
) -> None:
    for token, (digest, bits) in new.items():
        if known.setdefault(token, (digest, bits))[0] != digest:
            side.conflicts.append((point, token))


def _join(side: SideTrace, point: Point, by_start: dict[int, dict[Token, tuple[int, Any]]]) -> None:
    """Parts of a row lie side by side: their digests add up, their elements follow each other."""
    starts = sorted(by_start)
    digests, rows = side.digests.setdefault(point, {}), side.rows.setdefault(point, {})
    for token in by_start[starts[0]]:
        held = [by_start[start].get(token) for start in starts]
        if None in held:
            continue
        digests[token] = sum(part[0] for part in held if part is not None) & _MASK
        bits = [part[1] for part in held if part is not None]
        if all(part is not None for part in bits):
            rows[token] = np.concatenate(bits)
