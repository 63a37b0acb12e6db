"""Which kernel and blocks serve a shape: a function of the shape alone. No choice here can change a bit.

`python -m samebits.ops.attention.launch TOKENS REQUESTS HEADS KV_HEADS HEAD_DIM CONTEXT` prints the choices.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from samebits.ops.attention.contract import CHUNK

SMS = 132  # of an H100 or H200; other cards get the same launches
FEW_ROWS = 16  # (token, head) rows of a request up to which its chunks are spread over programs
MOST_PROGRAMS = 16 * SMS


@dataclass(frozen=True)
class Rows:
    """Programs that own `rows` (token, head) rows and read `stages` tiles ahead."""

    rows: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Split:
    """Programs that own few rows, `splits` of them for each block of rows; `direct`: no second kernel."""

    rows: int
    splits: int
    direct: bool
    warps: int
    stages: int
    merge_rows: int
    ahead: int


@dataclass(frozen=True)
class Keys:
    """Programs that own the gradients of `keys` keys and take `rows` rows at a time."""

    keys: int
    rows: int
    warps: int
    stages: int


def forward(head_dim: int) -> Rows:
    return Rows(128, 8, 2) if head_dim <= 128 else Rows(64, 4, 2)


def split(tokens: int, kv_heads: int, group: int, chunks: int) -> Split:
    """For at most `tokens` query tokens whose keys lie in at most `chunks` chunks."""
    rows = max(FEW_ROWS, 1 << (group - 1).bit_length())
    blocks = max(1, tokens * kv_heads)
    splits = max(1, min(chunks, -(-MOST_PROGRAMS // blocks)))
    return Split(rows, splits, chunks == 1, 4, 3, max(1, min(4, rows)), 8)


def query_gradients(head_dim: int) -> Rows:
    return Rows(128, 8, 2) if head_dim <= 128 else Rows(64, 4, 1)


def key_gradients(head_dim: int) -> Keys:
    return Keys(128, 64, 8, 2) if head_dim <= 128 else Keys(64, 32, 4, 1)


def main(arguments: list[str]) -> None:
    tokens, requests, heads, kv_heads, head_dim, context = (int(a) for a in arguments)
    chunks = -(-context // CHUNK)
    print("forward  ", forward(head_dim))
    print("split    ", split(max(tokens, requests), kv_heads, heads // kv_heads, chunks))
    print("backward ", query_gradients(head_dim), key_gradients(head_dim))


if __name__ == "__main__":
    main(sys.argv[1:])
