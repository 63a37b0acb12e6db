"""Forward over rows: each program owns some query rows of one kv head and walks over all of their keys."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from samebits.arithmetic.triton import count_launch, round_bf16_of
from samebits.ops.attention.triton_rows import find_rows, key_rows, load_rows
from samebits.ops.attention.triton_softmax import KEYS, SUMS, TILES, fold_columns, merged, tile_of


@triton.jit(do_not_specialize=["tokens", "B"])
def forward_rows(
    q, k, v, out, m_out, l_out, rows_of, keys_of, positions, table, counter,
    tokens, B, q_token, q_head, k_token, k_head, v_token, v_head, page_stride, table_stride, c,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, BATCH: tl.constexpr, POSITIONS: tl.constexpr, STATISTICS: tl.constexpr,
    LEAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sequences with at least LEAST (token, head) rows.

    rows_of [B+1]: offsets of query rows; keys_of: offsets [B+1] of packed keys, or lengths [B] of keys in pages.
    """
    count_launch(counter)
    head = tl.program_id(0) % HEADS
    b, first = find_rows(tl.program_id(0) // HEADS, rows_of, B, GROUP, ROWS, BATCH, LEAST, 2**31 - 1, True)
    r = first + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    if b < 0:  # rows outside every sequence
        row = tl.load(rows_of + B) * GROUP + first * ROWS + tl.arange(0, ROWS)
        token = row // GROUP
        at = (token.to(tl.int64) * HEADS + head) * GROUP + row % GROUP
        ok = token < tokens
        tl.store(
            out + at[:, None] * D + d[None, :],
            tl.zeros((ROWS, WIDTH), tl.bfloat16),
            mask=ok[:, None] & (d < D)[None, :],
        )
        if STATISTICS:
            tl.store(m_out + at, tl.zeros((ROWS,), tl.float32), mask=ok)
            tl.store(l_out + at, tl.zeros((ROWS,), tl.float32), mask=ok)
        return
    begin = tl.load(rows_of + b)
    count = tl.load(rows_of + b + 1) - begin
    if SIZE > 0:
        start, length = 0, tl.load(keys_of + b)
        table += b.to(tl.int64) * table_stride
    else:
        start = tl.load(keys_of + b)
        length = tl.load(keys_of + b + 1) - start
    ok = r < count * GROUP
    token = begin + tl.minimum(r // GROUP, count - 1)
    if POSITIONS:
        position = tl.load(positions + token)
        lowest = tl.load(positions + begin + first // GROUP)
        highest = tl.load(positions + begin + tl.minimum((first + ROWS - 1) // GROUP, count - 1))
    else:  # the rows are the last tokens
        position = token - begin + (length - count)
        lowest = first // GROUP + (length - count)
        highest = tl.minimum((first + ROWS - 1) // GROUP, count - 1) + (length - count)
    queries = token.to(tl.int64) * q_token + (head * GROUP + r % GROUP) * q_head
    qt = load_rows(q, queries, d, ok, True, D, WIDTH)
    k += head * k_head
    v += head * v_head

    total_m = tl.full((ROWS,), float("-inf"), tl.float32)
    total_l = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    lanes = tl.zeros((ROWS, SUMS), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    tiles = highest // KEYS + 1
    whole = tl.minimum((lowest + 1) // KEYS, tiles - 1)  # tiles of which every row attends to every key
    j = tl.arange(0, KEYS)
    for tile in tl.range(0, whole, num_stages=STAGES):
        keys = tile * KEYS + j
        k_rows = key_rows(keys, length, table, page_stride, k_token, start, SIZE, False)
        kt = load_rows(k, k_rows, d, ok, False, D, WIDTH)
        s = tl.dot(qt, kt.T)
        v_rows = key_rows(keys, length, table, page_stride, v_token, start, SIZE, False)
        vt = load_rows(v, v_rows, d, ok, False, D, WIDTH)
        m, lanes, acc = tile_of(m, lanes, acc, s, vt, c, ok, ok, ROWS, False)
        if tile % TILES == TILES - 1:
            lsum = tl.reshape(fold_columns(lanes, ROWS, SUMS, 1), (ROWS,))
            total_m, total_l, total = merged(total_m, total_l, total, m, lsum, acc)
            m = tl.full((ROWS,), float("-inf"), tl.float32)
            lanes = tl.zeros((ROWS, SUMS), tl.float32)
            acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for tile in tl.range(whole, tiles, num_stages=1):
        keys = tile * KEYS + j
        inside = keys < length
        k_rows = key_rows(keys, length, table, page_stride, k_token, start, SIZE, True)
        kt = load_rows(k, k_rows, d, inside, True, D, WIDTH)
        s = tl.dot(qt, kt.T)
        v_rows = key_rows(keys, length, table, page_stride, v_token, start, SIZE, True)
        vt = load_rows(v, v_rows, d, inside, True, D, WIDTH)
        valid = keys[None, :] <= position[:, None]
        m, lanes, acc = tile_of(m, lanes, acc, s, vt, c, valid, position >= tile * KEYS, ROWS, True)
        if (tile % TILES == TILES - 1) | (tile == tiles - 1):
            reached = position >= tile // TILES * (TILES * KEYS)
            lsum = tl.reshape(fold_columns(lanes, ROWS, SUMS, 1), (ROWS,))
            new_m, new_l, new = merged(total_m, total_l, total, m, lsum, acc)
            total_m = tl.where(reached, new_m, total_m)
            total_l = tl.where(reached, new_l, total_l)
            total = tl.where(reached[:, None], new, total)
            m = tl.full((ROWS,), float("-inf"), tl.float32)
            lanes = tl.zeros((ROWS, SUMS), tl.float32)
            acc = tl.zeros((ROWS, WIDTH), tl.float32)
    at = (token.to(tl.int64) * HEADS + head) * GROUP + r % GROUP
    if STATISTICS:
        tl.store(m_out + at, total_m, mask=ok)
        tl.store(l_out + at, total_l, mask=ok)
    rounded = round_bf16_of(total * tl.div_rn(1.0, total_l)[:, None])
    tl.store(out + at[:, None] * D + d[None, :], rounded, mask=ok[:, None] & (d < D)[None, :])
