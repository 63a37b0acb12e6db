"""Forward for few rows per sequence (decode): programs share the chunks of a row; a second kernel merges them."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated, misc"

from __future__ import annotations

import triton
import triton.language as tl

from samebits.arithmetic.triton import count_launch, round_bf16_of
from samebits.ops.attention.triton_rows import find_rows, key_rows, load_rows
from samebits.ops.attention.triton_softmax import KEYS, SUMS, TILES, fold_columns, merged, tile_of


@triton.jit
def _rows_and_positions(first, begin, count, length, GROUP: tl.constexpr, ROWS: tl.constexpr):
    r = first + tl.arange(0, ROWS)
    token = tl.minimum(r // GROUP, count - 1)
    return r, begin + token, r < count * GROUP, token + (length - count)


@triton.jit
def _place(
    b, token, begin, head, r, HEADS: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr, BY_REQUEST: tl.constexpr
):
    """Where the states of (token, head) rows lie within those of a chunk."""
    if BY_REQUEST:
        token = b * (MOST // GROUP) + token - begin
    return (token.to(tl.int64) * HEADS + head) * GROUP + r % GROUP


@triton.jit(do_not_specialize=["held", "splits", "B"])
def chunk_states(
    q, k, v, out, m_out, l_out, acc_out, rows_of, lengths, table, counter,
    held, splits, B, q_token, q_head, k_token, k_head, v_token, v_head, page_stride, table_stride, c,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, BATCH: tl.constexpr, MOST: tl.constexpr, BY_REQUEST: tl.constexpr, DIRECT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program (block and head, split) takes the chunks split, split + splits, ... of its rows, keys in pages.

    The states go to m_out, l_out [chunk, held * heads] and acc_out [chunk, held * heads, D], by token or with as many
    places for each request as it may have; where DIRECT (rows of one chunk), the result goes to `out`.
    """
    count_launch(counter)
    head = tl.program_id(0) % HEADS
    b, first = find_rows(tl.program_id(0) // HEADS, rows_of, B, GROUP, ROWS, BATCH, 1, MOST, False)
    if b < 0:
        return
    begin = tl.load(rows_of + b)
    count = tl.load(rows_of + b + 1) - begin
    length = tl.load(lengths + b)
    table += b.to(tl.int64) * table_stride
    r, token, ok, position = _rows_and_positions(first, begin, count, length, GROUP, ROWS)
    highest = tl.minimum((first + ROWS - 1) // GROUP, count - 1) + (length - count)
    tiles = highest // KEYS + 1
    chunks = (tiles + TILES - 1) // TILES
    split = tl.program_id(1)
    own = (chunks - split + splits - 1) // splits
    if own <= 0:
        return
    steps = own * TILES
    if split + (own - 1) * splits == chunks - 1:
        steps -= chunks * TILES - tiles
    d = tl.arange(0, WIDTH)
    j = tl.arange(0, KEYS)
    queries = token.to(tl.int64) * q_token + (head * GROUP + r % GROUP) * q_head
    qt = load_rows(q, queries, d, ok, True, D, WIDTH)
    k += head * k_head
    v += head * v_head
    at = (token.to(tl.int64) * HEADS + head) * GROUP + r % GROUP
    state_at = _place(b, token, begin, head, r, HEADS, GROUP, MOST, BY_REQUEST)
    all_rows = held.to(tl.int64) * (HEADS * GROUP)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    lanes = tl.zeros((ROWS, SUMS), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        chunk = split + step // TILES * splits
        first_key = (chunk * TILES + step % TILES) * KEYS
        keys = first_key + j
        inside = keys < length
        k_rows = key_rows(keys, length, table, page_stride, k_token, 0, SIZE, True)
        kt = load_rows(k, k_rows, d, inside, True, D, WIDTH)
        v_rows = key_rows(keys, length, table, page_stride, v_token, 0, SIZE, True)
        vt = load_rows(v, v_rows, d, inside, True, D, WIDTH)
        s = tl.dot(qt, kt.T)
        valid = keys[None, :] <= position[:, None]
        m, lanes, acc = tile_of(m, lanes, acc, s, vt, c, valid, position >= first_key, ROWS, True)
        if (step % TILES == TILES - 1) | (step == steps - 1):
            lsum = tl.reshape(fold_columns(lanes, ROWS, SUMS, 1), (ROWS,))
            there = ok[:, None] & (d < D)[None, :]
            if DIRECT:
                rounded = round_bf16_of(acc * tl.div_rn(1.0, lsum)[:, None])
                tl.store(out + at[:, None] * D + d[None, :], rounded, mask=there)
            else:
                to = chunk.to(tl.int64) * all_rows + state_at
                tl.store(m_out + to, m, mask=ok)
                tl.store(l_out + to, lsum, mask=ok)
                tl.store(acc_out + to[:, None] * D + d[None, :], acc, mask=there)
            m = tl.full((ROWS,), float("-inf"), tl.float32)
            lanes = tl.zeros((ROWS, SUMS), tl.float32)
            acc = tl.zeros((ROWS, WIDTH), tl.float32)


@triton.jit(do_not_specialize=["tokens", "held", "B"])
def merge_chunks(
    m_in, l_in, acc_in, out, rows_of, lengths, counter, tokens, held, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BATCH: tl.constexpr, MOST: tl.constexpr, AHEAD: tl.constexpr, BY_REQUEST: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """The chunk states of each row merged, chunks ascending, AHEAD of them read at a time; +0 outside all requests.

    Where DIRECT only the rows outside all requests are left to do.
    """
    count_launch(counter)
    head = tl.program_id(0) % HEADS
    b, first = find_rows(tl.program_id(0) // HEADS, rows_of, B, GROUP, ROWS, BATCH, 1, MOST, False)
    d = tl.arange(0, WIDTH)
    if b < 0:
        row = tl.load(rows_of + B) * GROUP + first * ROWS + tl.arange(0, ROWS)
        to = ((row // GROUP).to(tl.int64) * HEADS + head) * GROUP + row % GROUP
        outside = (row // GROUP < tokens)[:, None] & (d < D)[None, :]
        tl.store(out + to[:, None] * D + d[None, :], tl.zeros((ROWS, WIDTH), tl.bfloat16), mask=outside)
        return
    if DIRECT:
        return
    begin = tl.load(rows_of + b)
    count = tl.load(rows_of + b + 1) - begin
    r, token, ok, position = _rows_and_positions(first, begin, count, tl.load(lengths + b), GROUP, ROWS)
    at = (token.to(tl.int64) * HEADS + head) * GROUP + r % GROUP
    state_at = _place(b, token, begin, head, r, HEADS, GROUP, MOST, BY_REQUEST)
    all_rows = held.to(tl.int64) * (HEADS * GROUP)
    own = position // (KEYS * TILES) + 1
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    lsum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for first_chunk in tl.range(0, tl.max(own, 0), AHEAD):
        states = ()
        for step in tl.static_range(AHEAD):  # all loads come first: the merges would wait for each of them
            there = ok & (first_chunk + step < own)
            source = (first_chunk + step) * all_rows + state_at
            m_c = tl.load(m_in + source, mask=there, other=0.0)
            l_c = tl.load(l_in + source, mask=there, other=0.0)
            inside = there[:, None] & (d < D)[None, :]
            acc_c = tl.load(acc_in + source[:, None] * D + d[None, :], mask=inside, other=0.0)
            states = states + ((m_c, l_c, acc_c),)
        for step in tl.static_range(AHEAD):
            there = ok & (first_chunk + step < own)
            new_m, new_l, new = merged(m, lsum, acc, states[step][0], states[step][1], states[step][2])
            m = tl.where(there, new_m, m)
            lsum = tl.where(there, new_l, lsum)
            acc = tl.where(there[:, None], new, acc)
    rounded = round_bf16_of(acc * tl.div_rn(1.0, lsum)[:, None])
    tl.store(out + at[:, None] * D + d[None, :], rounded, mask=ok[:, None] & (d < D)[None, :])
