"""Which kernel and blocks serve a shape: a function of the shape alone. No choice here can change a bit.

`python -m samebits.ops.attention.launch TOKENS REQUESTS HEADS KV_HEADS HEAD_DIM CONTEXT` prints the choices.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TypeVar

from samebits.ops.attention.contract import CHUNK

SMS = 132  # of an H100 or H200; other cards get the same launches
FEW_ROWS = 16  # (token, head) rows of a request up to which its chunks are spread over programs
MOST_PROGRAMS = 16 * SMS


@dataclass(frozen=True)
class Rows:
    """Programs that own `rows` (token, head) rows and read `stages` tiles ahead.

    `copies`: the Gluon form, whose keys are copied by Hopper's tensor engine.
    """

    rows: int
    warps: int
    stages: int
    copies: bool = False


@dataclass(frozen=True)
class Split:
    """Programs that own few rows, `splits` of them for each block of rows.

    `direct`: all keys of a row lie in one chunk, so nothing is merged; `copies`: the Gluon form, whose keys are
    copied by Hopper's tensor engine (`warps` is 1 there).
    """

    rows: int
    splits: int
    direct: bool
    warps: int
    stages: int
    merge_rows: int
    ahead: int
    copies: bool = False


@dataclass(frozen=True)
class Keys:
    """Programs that own the gradients of `keys` keys and take `rows` rows at a time."""

    keys: int
    rows: int
    warps: int
    stages: int


Choice = TypeVar("Choice", Rows, Split, Keys)


def forward(head_dim: int, copies: bool = False) -> Rows:
    if copies:
        return Rows(128, 4, 4, copies=True)
    return Rows(128, 8, 2) if head_dim <= 128 else Rows(64, 4, 2)


def split(tokens: int, kv_heads: int, group: int, chunks: int, copies: bool = False) -> Split:
    """For at most `tokens` query tokens whose keys lie in at most `chunks` chunks."""
    rows = max(FEW_ROWS, 1 << (group - 1).bit_length())
    blocks = max(1, tokens * kv_heads)
    splits = max(1, min(chunks, -(-MOST_PROGRAMS // blocks)))
    if copies and rows == FEW_ROWS:
        # few programs have a multiprocessor to themselves; many hide the copies of one behind the work of others
        alone = blocks * splits <= 2 * SMS
        stages = 1 if splits == chunks and not alone else 2
        return Split(rows, splits, chunks == 1, 1, stages, 1, 8, copies=True)
    return Split(rows, splits, chunks == 1, 4, 3, 1, 8)


def query_gradients(head_dim: int) -> Rows:
    return Rows(128, 8, 3) if head_dim <= 128 else Rows(64, 4, 1)


def key_gradients(head_dim: int) -> Keys:
    return Keys(128, 64, 8, 2) if head_dim <= 128 else Keys(64, 32, 4, 1)


def for_amd(how: Choice) -> Choice:
    """The same for MI300X: 64 KiB of shared memory, waves of 64 threads. Compiled, not yet run."""
    if isinstance(how, Rows):
        return replace(how, rows=min(how.rows, 64), warps=4, stages=1)
    if isinstance(how, Split):
        return replace(how, warps=1, stages=1)
    return replace(how, keys=min(how.keys, 64), rows=32, warps=4, stages=1)


def main(arguments: list[str]) -> None:
    tokens, requests, heads, kv_heads, head_dim, context = (int(a) for a in arguments)
    chunks = -(-context // CHUNK)
    print("forward  ", forward(head_dim))
    print("split    ", split(max(tokens, requests), kv_heads, heads // kv_heads, chunks))
    print("backward ", query_gradients(head_dim), key_gradients(head_dim))


if __name__ == "__main__":
    main(sys.argv[1:])
