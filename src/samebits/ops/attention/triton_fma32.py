"""The slow form: arithmetic fma32 with the softmax that goes with it, so the bits of a CPU. Packed or paged keys."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from samebits.arithmetic.triton import count_launch, exp2_of, round_bf16_of
from samebits.ops.attention.triton_rows import find_rows, key_rows
from samebits.ops.attention.triton_softmax import KEYS, TILES, fold_columns


@triton.jit
def _products(x, rows, ok, y, columns, inside, D: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, KEYS]: chains of fma over d of x[rows, d] y[columns, d]."""
    acc = tl.zeros((ROWS, KEYS), tl.float32)
    for d in tl.range(0, D):
        a = tl.load(x + rows + d, mask=ok, other=0.0).to(tl.float32)
        b = tl.load(y + columns + d, mask=inside, other=0.0).to(tl.float32)
        acc = tl.fma(a[:, None], b[None, :], acc)
    return acc


@triton.jit
def _chained(acc, p, y, columns, valid, j, d, D: tl.constexpr):
    """acc [ROWS, D] = fma(p_j, y_j, acc), j ascending where valid; elsewhere acc + 0."""
    for step in tl.range(0, KEYS):
        # one column of p: all other terms of the sum are zero
        a = tl.sum(tl.where((j == step)[None, :], p, 0.0), 1)
        there = tl.sum(((j == step)[None, :] & valid).to(tl.int32), 1) > 0
        at = tl.sum(tl.where(j == step, columns, 0), 0)
        row = tl.load(y + at + d, mask=(d < D) & (tl.max(there.to(tl.int32), 0) > 0), other=0.0).to(tl.float32)
        acc = tl.where(there[:, None], tl.fma(a[:, None], row[None, :], acc), acc + 0.0)
    return acc


@triton.jit
def _bf16(p):
    return round_bf16_of(p).to(tl.float32)


@triton.jit
def _merged(m, lsum, acc, m_later, lsum_later, acc_later):
    m_next = tl.maximum(m, m_later)
    a = exp2_of(m - m_next)
    b = exp2_of(m_later - m_next)
    return m_next, tl.fma(lsum, a, lsum_later * b), tl.fma(acc, a[:, None], acc_later * b[:, None])


@triton.jit(do_not_specialize=["tokens", "B"])
def forward_rows(
    q, k, v, out, m_out, l_out, rows_of, keys_of, positions, table, counter,
    tokens, B, q_token, q_head, k_token, k_head, v_token, v_head, page_stride, table_stride, c,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, BATCH: tl.constexpr, POSITIONS: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """`out`, `m_out` and `l_out` hold zeros before."""
    count_launch(counter)
    head = tl.program_id(0) % HEADS
    b, first = find_rows(tl.program_id(0) // HEADS, rows_of, B, GROUP, ROWS, BATCH, 1, 2**31 - 1, True)
    if b < 0:
        return
    r = first + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    j = tl.arange(0, KEYS)
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
    else:
        position = token - begin + (length - count)
    highest = tl.max(position, 0)
    queries = token.to(tl.int64) * q_token + (head * GROUP + r % GROUP) * q_head
    k += head * k_head
    v += head * v_head
    total_m = tl.full((ROWS,), float("-inf"), tl.float32)
    total_l = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for chunk in tl.range(0, highest // (KEYS * TILES) + 1):
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        lsum = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, WIDTH), tl.float32)
        for tile in tl.range(chunk * TILES, tl.minimum((chunk + 1) * TILES, highest // KEYS + 1)):
            keys = tile * KEYS + j
            inside = keys < length
            k_rows = key_rows(keys, length, table, page_stride, k_token, start, SIZE, True)
            v_rows = key_rows(keys, length, table, page_stride, v_token, start, SIZE, True)
            t = _products(q, queries, ok, k, k_rows, inside, D, ROWS) * c
            valid = keys[None, :] <= position[:, None]
            live = position >= tile * KEYS
            m_next = tl.maximum(m, tl.max(tl.where(valid & (t == t), t, float("-inf")), 1))
            a = tl.where(live, exp2_of(m - m_next), 1.0)
            p = tl.where(valid, exp2_of(t - m_next[:, None]), 0.0)
            row_sum = tl.reshape(fold_columns(p, ROWS, KEYS, 1), (ROWS,))
            lsum = tl.where(live, tl.fma(lsum, a, row_sum), lsum)
            added = _chained(acc * a[:, None], _bf16(p), v, v_rows, valid, j, d, D)
            acc = tl.where(live[:, None], added, acc)
            m = m_next
        new_m, new_l, new = _merged(total_m, total_l, total, m, lsum, acc)
        reached = (position >= chunk * KEYS * TILES) & (chunk > 0)
        total_m = tl.where(reached, new_m, tl.where(chunk == 0, m, total_m))
        total_l = tl.where(reached, new_l, tl.where(chunk == 0, lsum, total_l))
        total = tl.where(reached[:, None], new, tl.where(chunk == 0, acc, total))
    at = (token.to(tl.int64) * HEADS + head) * GROUP + r % GROUP
    if STATISTICS:
        tl.store(m_out + at, total_m, mask=ok)
        tl.store(l_out + at, total_l, mask=ok)
    rounded = round_bf16_of(tl.div_rn(total, total_l[:, None] + tl.zeros_like(total)))
    tl.store(out + at[:, None] * D + d[None, :], rounded, mask=ok[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["B"])
def query_gradients(
    q, k, v, dout, m, inverse, delta, dq, rows_of, keys_of, positions, counter,
    B, q_token, q_head, k_token, k_head, v_token, v_head, do_token, do_head, c, factor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BATCH: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """`dq` holds zeros before."""
    count_launch(counter)
    head = tl.program_id(0) % HEADS
    b, first = find_rows(tl.program_id(0) // HEADS, rows_of, B, GROUP, ROWS, BATCH, 1, 2**31 - 1, True)
    if b < 0:
        return
    r = first + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    j = tl.arange(0, KEYS)
    begin = tl.load(rows_of + b)
    count = tl.load(rows_of + b + 1) - begin
    start = tl.load(keys_of + b)
    length = tl.load(keys_of + b + 1) - start
    ok = r < count * GROUP
    token = begin + tl.minimum(r // GROUP, count - 1)
    if POSITIONS:
        position = tl.load(positions + token)
    else:
        position = token - begin
    at = (token.to(tl.int64) * HEADS + head) * GROUP + r % GROUP
    own = head * GROUP + r % GROUP
    queries = token.to(tl.int64) * q_token + own * q_head
    douts = token.to(tl.int64) * do_token + own * do_head
    m_row = tl.load(m + at)
    inv = tl.load(inverse + at)
    delta_row = tl.load(delta + at)
    k += head * k_head
    v += head * v_head
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for tile in tl.range(0, (length + KEYS - 1) // KEYS):
        keys = tile * KEYS + j
        inside = keys < length
        k_rows = (start + keys).to(tl.int64) * k_token
        v_rows = (start + keys).to(tl.int64) * v_token
        p = exp2_of(_products(q, queries, ok, k, k_rows, inside, D, ROWS) * c - m_row[:, None]) * inv[:, None]
        ds = p * (_products(dout, douts, ok, v, v_rows, inside, D, ROWS) - delta_row[:, None])
        valid = keys[None, :] <= position[:, None]
        acc = _chained(acc, tl.where(valid, _bf16(ds), 0.0), k, k_rows, valid, j, d, D)
    rounded = round_bf16_of((acc + 0.0) * factor)
    tl.store(dq + at[:, None] * D + d[None, :], rounded, mask=ok[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["B"])
def key_gradients(
    q, k, v, dout, m, inverse, delta, dk_out, dv_out, rows_of, keys_of, positions, counter,
    B, q_token, q_head, k_token, k_head, v_token, v_head, do_token, do_head, c, factor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BATCH: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """`dk_out` and `dv_out` hold zeros before; one row at a time."""
    count_launch(counter)
    head = tl.program_id(0) % HEADS
    b, first = find_rows(tl.program_id(0) // HEADS, keys_of, B, 1, KEYS, BATCH, 1, 2**31 - 1, False)
    if b < 0:
        return
    d = tl.arange(0, WIDTH)
    begin = tl.load(rows_of + b)
    count = tl.load(rows_of + b + 1) - begin
    start = tl.load(keys_of + b)
    length = tl.load(keys_of + b + 1) - start
    keys = first + tl.arange(0, KEYS)
    inside = keys < length
    k_rows = (start + keys).to(tl.int64) * k_token + head * k_head
    v_rows = (start + keys).to(tl.int64) * v_token + head * v_head
    dk = tl.zeros((KEYS, WIDTH), tl.float32)
    dv = tl.zeros((KEYS, WIDTH), tl.float32)
    for r in tl.range(0, count * GROUP):
        token = (begin + r // GROUP).to(tl.int64)
        own = head * GROUP + r % GROUP
        at = token * (HEADS * GROUP) + own
        s = tl.zeros((KEYS,), tl.float32)
        dp = tl.zeros((KEYS,), tl.float32)
        for e in tl.range(0, D):
            x = tl.load(q + token * q_token + own * q_head + e).to(tl.float32)
            s = tl.fma(x, tl.load(k + k_rows + e, mask=inside, other=0.0).to(tl.float32), s)
            y = tl.load(dout + token * do_token + own * do_head + e).to(tl.float32)
            dp = tl.fma(y, tl.load(v + v_rows + e, mask=inside, other=0.0).to(tl.float32), dp)
        p = exp2_of(s * c - tl.load(m + at)) * tl.load(inverse + at)
        ds = p * (dp - tl.load(delta + at))
        if POSITIONS:
            position = tl.load(positions + token)
        else:
            position = r // GROUP
        valid = keys <= position
        q_row = tl.load(q + token * q_token + own * q_head + d, mask=d < D, other=0.0).to(tl.float32)
        do_row = tl.load(dout + token * do_token + own * do_head + d, mask=d < D, other=0.0).to(tl.float32)
        dk = tl.where(valid[:, None], tl.fma(_bf16(ds)[:, None], q_row[None, :], dk), dk + 0.0)
        dv = tl.where(valid[:, None], tl.fma(_bf16(p)[:, None], do_row[None, :], dv), dv + 0.0)
    to = ((start + keys).to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
    there = inside[:, None] & (d < D)[None, :]
    tl.store(dk_out + to, round_bf16_of((dk + 0.0) * factor), mask=there)
    tl.store(dv_out + to, round_bf16_of(dv + 0.0), mask=there)
