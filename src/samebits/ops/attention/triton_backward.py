"""Backward in two kernels without atomics: dQ over keys, dK and dV over query rows; each chain has one owner."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from samebits.arithmetic.triton import count_launch, round_bf16_of
from samebits.ops.attention.contract import LANES
from samebits.ops.attention.triton_rows import find_rows, load_rows
from samebits.ops.attention.triton_softmax import KEYS, fold_columns, weight_of

_LANES = tl.constexpr(LANES)


@triton.jit
def row_statistics(
    dout, out, lsum, delta, inverse, counter, rows, do_token, do_head,
    HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta = the lane dot of dO and O, and 1 / l, for rows (token, head)."""
    count_launch(counter)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = row < rows
    lane = tl.arange(0, _LANES)
    dout += row // HEADS * do_token + row % HEADS * do_head
    acc = tl.zeros((ROWS, _LANES), tl.float32)
    for start in tl.static_range(0, D, _LANES):
        there = ok[:, None] & (start + lane < D)[None, :]
        x = tl.load(dout[:, None] + (start + lane)[None, :], mask=there, other=0.0)
        y = tl.load(out + row[:, None] * D + (start + lane)[None, :], mask=there, other=0.0)
        acc = tl.where(there, tl.fma(x.to(tl.float32), y.to(tl.float32), acc), acc)
    tl.store(delta + row, tl.reshape(fold_columns(acc, ROWS, _LANES, 1), (ROWS,)), mask=ok)
    tl.store(inverse + row, tl.div_rn(1.0, tl.load(lsum + row, mask=ok, other=1.0)), mask=ok)


@triton.jit(do_not_specialize=["tokens", "B"])
def query_gradients(
    q, k, v, dout, m, inverse, delta, dq, rows_of, keys_of, positions, counter,
    tokens, B, q_token, q_head, k_token, k_head, v_token, v_head, do_token, do_head, c, factor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BATCH: tl.constexpr, POSITIONS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ of ROWS (token, head) rows of one kv head: a chain over all of their keys, ascending."""
    count_launch(counter)
    head = tl.program_id(0) % HEADS
    b, first = find_rows(tl.program_id(0) // HEADS, rows_of, B, GROUP, ROWS, BATCH, 1, 2**31 - 1, True)
    r = first + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    if b < 0:
        row = tl.load(rows_of + B) * GROUP + first * ROWS + tl.arange(0, ROWS)
        to = ((row // GROUP).to(tl.int64) * HEADS + head) * GROUP + row % GROUP
        outside = (row // GROUP < tokens)[:, None] & (d < D)[None, :]
        tl.store(dq + to[:, None] * D + d[None, :], tl.zeros((ROWS, WIDTH), tl.bfloat16), mask=outside)
        return
    begin = tl.load(rows_of + b)
    count = tl.load(rows_of + b + 1) - begin
    start = tl.load(keys_of + b)
    length = tl.load(keys_of + b + 1) - start
    ok = r < count * GROUP
    token = begin + tl.minimum(r // GROUP, count - 1)
    if POSITIONS:
        position = tl.load(positions + token)
        lowest = tl.load(positions + begin + first // GROUP)
        highest = tl.load(positions + begin + tl.minimum((first + ROWS - 1) // GROUP, count - 1))
    else:
        position = token - begin
        lowest = first // GROUP
        highest = tl.minimum((first + ROWS - 1) // GROUP, count - 1)
    at = (token.to(tl.int64) * HEADS + head) * GROUP + r % GROUP
    own = head * GROUP + r % GROUP
    qt = load_rows(q, token.to(tl.int64) * q_token + own * q_head, d, ok, True, D, WIDTH)
    dot = load_rows(dout, token.to(tl.int64) * do_token + own * do_head, d, ok, True, D, WIDTH)
    m_row = tl.load(m + at)
    inv = tl.load(inverse + at)
    delta_row = tl.load(delta + at)
    k += head * k_head
    v += head * v_head
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    tiles = highest // KEYS + 1
    whole = tl.minimum((lowest + 1) // KEYS, tiles - 1)
    j = tl.arange(0, KEYS)
    for tile in tl.range(0, whole, num_stages=STAGES):
        keys = (start + tile * KEYS + j).to(tl.int64)
        kt = load_rows(k, keys * k_token, d, ok, False, D, WIDTH)
        vt = load_rows(v, keys * v_token, d, ok, False, D, WIDTH)
        p = weight_of(tl.fma(tl.dot(qt, kt.T), c, -m_row[:, None])) * inv[:, None]
        ds = p * (tl.dot(dot, vt.T) - delta_row[:, None])
        acc = tl.dot(ds.to(tl.bfloat16), kt, acc)
    for tile in tl.range(whole, tiles, num_stages=1):
        inside = tile * KEYS + j < length
        keys = (start + tile * KEYS + j).to(tl.int64)
        kt = load_rows(k, keys * k_token, d, inside, True, D, WIDTH)
        vt = load_rows(v, keys * v_token, d, inside, True, D, WIDTH)
        valid = (tile * KEYS + j)[None, :] <= position[:, None]
        p = weight_of(tl.fma(tl.dot(qt, kt.T), c, -m_row[:, None])) * inv[:, None]
        ds = tl.where(valid, p * (tl.dot(dot, vt.T) - delta_row[:, None]), 0.0)
        acc = tl.dot(ds.to(tl.bfloat16), kt, acc)
    tl.store(dq + at[:, None] * D + d[None, :], round_bf16_of(acc * factor), mask=ok[:, None] & (d < D)[None, :])


@triton.jit
def first_row_at(positions, begin, count, key):
    """The first of `count` non-descending positions (from `begin`) that is at least `key`."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        below = tl.load(positions + begin + middle) < key
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def _key_step(
    r, ok, q, dout, m, inverse, delta, kt, vt, dk, dv, keys, positions, begin, count, head,
    q_token, q_head, do_token, do_head, c, d,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, POSITIONS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """dK and dV after the rows r; those past the end are zeros of q and dO, so they add nothing."""
    token = begin + tl.minimum(r // GROUP, count - 1)
    own = head * GROUP + r % GROUP
    at = (token.to(tl.int64) * HEADS + head) * GROUP + r % GROUP
    qt = load_rows(q, token.to(tl.int64) * q_token + own * q_head, d, ok, True, D, WIDTH)
    dot = load_rows(dout, token.to(tl.int64) * do_token + own * do_head, d, ok, True, D, WIDTH)
    m_row = tl.load(m + at)
    inv = tl.load(inverse + at)
    delta_row = tl.load(delta + at)
    p = weight_of(tl.fma(tl.dot(kt, qt.T), c, -m_row[None, :])) * inv[None, :]
    dp = tl.dot(vt, dot.T)
    ds = p * (dp - delta_row[None, :])
    if MASKED:
        if POSITIONS:
            position = tl.load(positions + token)
        else:
            position = token - begin
        valid = keys[:, None] <= position[None, :]
        p = tl.where(valid, p, 0.0)
        ds = tl.where(valid, ds, 0.0)
    dv = tl.dot(p.to(tl.bfloat16), dot, dv)
    dk = tl.dot(ds.to(tl.bfloat16), qt, dk)
    return dk, dv


@triton.jit(do_not_specialize=["tokens", "B"])
def key_gradients(
    q, k, v, dout, m, inverse, delta, dk_out, dv_out, rows_of, keys_of, positions, counter,
    tokens, B, q_token, q_head, k_token, k_head, v_token, v_head, do_token, do_head, c, factor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    OWN: tl.constexpr, BATCH: tl.constexpr, POSITIONS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK and dV of OWN keys of one kv head: chains over the (token, head) rows, ROWS at a time, ascending.

    `tokens` counts the rows of k and v.
    """
    count_launch(counter)
    head = tl.program_id(0) % HEADS
    b, first = find_rows(tl.program_id(0) // HEADS, keys_of, B, 1, OWN, BATCH, 1, 2**31 - 1, False)
    d = tl.arange(0, WIDTH)
    own = tl.arange(0, OWN)
    if b < 0:
        row = tl.load(keys_of + B) + first * OWN + own
        to = (row.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
        outside = (row < tokens)[:, None] & (d < D)[None, :]
        tl.store(dk_out + to, tl.zeros((OWN, WIDTH), tl.bfloat16), mask=outside)
        tl.store(dv_out + to, tl.zeros((OWN, WIDTH), tl.bfloat16), mask=outside)
        return
    begin = tl.load(rows_of + b)
    count = tl.load(rows_of + b + 1) - begin
    start = tl.load(keys_of + b)
    length = tl.load(keys_of + b + 1) - start
    keys = first + own
    inside = keys < length
    sources = (start + tl.minimum(keys, length - 1)).to(tl.int64)
    kt = load_rows(k + head * k_head, sources * k_token, d, inside, True, D, WIDTH)
    vt = load_rows(v + head * v_head, sources * v_token, d, inside, True, D, WIDTH)
    if POSITIONS:
        low = first_row_at(positions, begin, count, first) * GROUP
        full = first_row_at(positions, begin, count, first + OWN - 1) * GROUP
    else:
        low = first * GROUP
        full = (first + OWN - 1) * GROUP
    rows = count * GROUP
    block = low // ROWS
    blocks = (rows + ROWS - 1) // ROWS
    masked_until = tl.minimum((full + ROWS - 1) // ROWS, blocks)  # from here on every row attends to every key
    dk = tl.zeros((OWN, WIDTH), tl.float32)
    dv = tl.zeros((OWN, WIDTH), tl.float32)
    j = tl.arange(0, ROWS)
    for step in tl.range(block, masked_until, num_stages=1):
        r = step * ROWS + j
        dk, dv = _key_step(
            r, r < rows, q, dout, m, inverse, delta, kt, vt, dk, dv, keys, positions, begin, count, head,
            q_token, q_head, do_token, do_head, c, d, HEADS, GROUP, D, WIDTH, POSITIONS, True,
        )  # fmt: skip
    for step in tl.range(masked_until, blocks, num_stages=STAGES):
        r = step * ROWS + j
        dk, dv = _key_step(
            r, r < rows, q, dout, m, inverse, delta, kt, vt, dk, dv, keys, positions, begin, count, head,
            q_token, q_head, do_token, do_head, c, d, HEADS, GROUP, D, WIDTH, POSITIONS, False,
        )  # fmt: skip
    to = ((start + keys).to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
    there = inside[:, None] & (d < D)[None, :]
    tl.store(dk_out + to, round_bf16_of(dk * factor), mask=there)
    tl.store(dv_out + to, round_bf16_of(dv), mask=there)
