"""Which rows a program owns, and reading rows of q, k and v."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_rows(
    block, rows_of, B, GROUP: tl.constexpr, ROWS: tl.constexpr, BATCH: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, LAST_FIRST: tl.constexpr,
):  # fmt: skip
    """(sequence, first of its (token, head) rows) of a block when each sequence is cut into blocks of ROWS.

    Sequences with fewer than LEAST or more than MOST rows have no blocks. Where LAST_FIRST, the last block of a
    sequence comes first. Sequence -1: no such block; then the second value counts blocks past the last one.
    """
    at = tl.arange(0, BATCH)
    begin = tl.load(rows_of + at, mask=at < B, other=0)
    end = tl.load(rows_of + at + 1, mask=at < B, other=0)
    rows = (end - begin) * GROUP
    blocks = tl.where((rows >= LEAST) & (rows <= MOST), (rows + ROWS - 1) // ROWS, 0)
    ends = tl.cumsum(blocks, 0)
    total = tl.sum(blocks, 0)
    b = tl.sum((ends <= block).to(tl.int32), 0)
    if LAST_FIRST:
        own = tl.sum(tl.where(at == b, ends, 0), 0) - 1 - block
    else:
        own = block - tl.sum(tl.where(at == b, ends - blocks, 0), 0)
    found = block < total
    return tl.where(found, b, -1), tl.where(found, own * ROWS, block - total)


@triton.jit
def key_rows(keys, length, table, page_stride, slot_stride, start, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Offsets of keys (absolute positions) in K: by page where SIZE > 0, else in place from row `start`."""
    if SIZE > 0:
        if MASKED:
            page = tl.load(table + keys // SIZE, mask=keys < length, other=0)
        else:
            page = tl.load(table + keys // SIZE)
        return page.to(tl.int64) * page_stride + (keys % SIZE) * slot_stride
    else:
        return (start + keys).to(tl.int64) * slot_stride


@triton.jit
def load_rows(x, rows, d, ok, MASK_ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """x[rows, d] with +0 in columns past D (WIDTH is the power of two above) and in rows that are not ok."""
    if MASK_ROWS:
        return tl.load(x + rows[:, None] + d[None, :], mask=ok[:, None] & (d[None, :] < D), other=0.0)
    elif WIDTH > D:
        return tl.load(x + rows[:, None] + d[None, :], mask=d[None, :] < D, other=0.0)
    else:
        return tl.load(x + rows[:, None] + d[None, :])
