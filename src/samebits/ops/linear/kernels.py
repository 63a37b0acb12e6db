"""Triton kernels of dot products: one output, one chain over k, whatever the tile.

The matrix unit takes a tile's k in order, so the tile, its warps and its stages never show in the bits. In
`matmul_*` a is [M, K] and b [N, K], or stored the other way round where A_T and B_T say so; c is [M, N].
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined"

from __future__ import annotations

import triton
import triton.language as tl

from samebits.arithmetic.triton import count_launch

NAN_BF16 = tl.constexpr(0x7FC0)


@triton.jit
def rounded(acc, OUT_BF16: tl.constexpr):
    """fp32 sums as they are stored: bf16 or fp32, every NaN the canonical one."""
    if OUT_BF16:
        bits = acc.to(tl.bfloat16).to(tl.int16, bitcast=True)
        out = tl.where(acc != acc, NAN_BF16, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        out = tl.where(acc != acc, float("nan"), acc)
    return out


@triton.jit
def tile_of(index, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row, column) of a tile: GROUP rows of tiles are walked column by column, so that both factors stay in L2."""
    per_group = GROUP * tiles_n
    group = index // per_group
    first = group * GROUP
    height = min(tiles_m - first, GROUP)
    inside = index % per_group
    return first + inside % height, inside // height


@triton.jit
def _load_tile(desc, row, k, TRANSPOSED: tl.constexpr):
    """Rows `row ..` of a factor at `k ..`, as [rows, k]."""
    if TRANSPOSED:
        tile = desc.load([k, row]).T
    else:
        tile = desc.load([row, k])
    return tile


@triton.jit
def _products(a_desc, b_desc, acc, row, column, k, A_T: tl.constexpr, B_T: tl.constexpr):
    a = _load_tile(a_desc, row, k, A_T)
    b = _load_tile(b_desc, column, k, B_T)
    return tl.dot(a, b.T, acc)


@triton.jit(do_not_specialize=["M", "N", "K"])
def matmul_persistent(
    a_desc,
    b_desc,
    c_desc,
    bias,
    counter,
    M,
    N,
    K,
    A_T: tl.constexpr,
    B_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SUBTILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUT_BF16: tl.constexpr,
):
    """c = a b^T (+ bias), rounded: each program walks over tiles and loads the next one while it stores the last."""
    count_launch(counter)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_of(index, tiles_m, tiles_n, GROUP)
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(steps):
            acc = _products(a_desc, b_desc, acc, row, column, step * BLOCK_K, A_T, B_T)
        if HAS_BIAS:
            at = column + tl.arange(0, BLOCK_N)
            acc += tl.load(bias + at, mask=at < N, other=0.0).to(tl.float32)[None, :]
        _store_parts(c_desc, acc, row, column, BLOCK_M, BLOCK_N, SUBTILES, OUT_BF16)


@triton.jit
def _store_parts(
    c_desc,
    acc,
    row,
    column,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    OUT_BF16: tl.constexpr,
):
    """Store a tile in PARTS of its columns, so that little shared memory is held for it."""
    if PARTS == 1:
        c_desc.store([row, column], rounded(acc, OUT_BF16))
    else:
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, WIDTH // 2)), (0, 2, 1)))
        _store_parts(c_desc, left, row, column, BLOCK_M, WIDTH // 2, PARTS // 2, OUT_BF16)
        _store_parts(c_desc, right, row, column + WIDTH // 2, BLOCK_M, WIDTH // 2, PARTS // 2, OUT_BF16)


@triton.jit(do_not_specialize=["M", "N", "K"])
def matmul_tile(
    a_desc,
    b_desc,
    c_desc,
    c,
    bias,
    partials,
    counter,
    M,
    N,
    K,
    stride_c,
    A_T: tl.constexpr,
    B_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SUBTILES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CONTINUE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUT_BF16: tl.constexpr,
):
    """c = a b^T tile by tile. CONTINUE: the chains start from what c holds (fp32).

    With SEGMENTS > 1 each segment of K is a chain of its own (K / SEGMENTS is a multiple of BLOCK_K); their sums wait
    in `partials`, fp32 [programs, log2 SEGMENTS, BLOCK_M, BLOCK_N], until their neighbour in the tree is there.
    """
    count_launch(counter)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for index in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = tile_of(index, tiles_m, tiles_n, GROUP)
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        if CONTINUE:
            rows = tl.arange(0, BLOCK_M)
            columns = tl.arange(0, BLOCK_N)
            inside = (rows < M - row)[:, None] & (columns < N - column)[None, :]
            start = c + row.to(tl.int64) * stride_c + column
            acc = tl.load(start + rows[:, None] * stride_c + columns[None, :], mask=inside, other=0.0)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if SEGMENTS == 1:
            for step in range(tl.cdiv(K, BLOCK_K)):
                acc = _products(a_desc, b_desc, acc, row, column, step * BLOCK_K, A_T, B_T)
        else:
            acc = _tree(a_desc, b_desc, partials, row, column, K, A_T, B_T, BLOCK_M, BLOCK_N, BLOCK_K, SEGMENTS)
        if HAS_BIAS:
            at = column + tl.arange(0, BLOCK_N)
            acc += tl.load(bias + at, mask=at < N, other=0.0).to(tl.float32)[None, :]
        _store_parts(c_desc, acc, row, column, BLOCK_M, BLOCK_N, SUBTILES, OUT_BF16)


@triton.jit
def _tree(
    a_desc,
    b_desc,
    partials,
    row,
    column,
    K,
    A_T: tl.constexpr,
    B_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """The balanced tree over the segments of one tile, walked like a binary counter."""
    spot = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    place = (
        partials + tl.program_id(0).to(tl.int64) * (tl.constexpr(SEGMENTS.bit_length() - 1) * BLOCK_M * BLOCK_N) + spot
    )
    steps = K // SEGMENTS // BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for segment in range(SEGMENTS):
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(steps):
            acc = _products(a_desc, b_desc, acc, row, column, (segment * steps + step) * BLOCK_K, A_T, B_T)
        level = 0
        rest = segment
        while rest % 2 == 1:
            tl.debug_barrier()
            acc = tl.load(place + level * (BLOCK_M * BLOCK_N)) + acc
            rest = rest // 2
            level += 1
        if segment < SEGMENTS - 1:
            tl.debug_barrier()
            tl.store(place + level * (BLOCK_M * BLOCK_N), acc)
    return acc


@triton.jit
def _load(pointers, row, inner, EVEN: tl.constexpr):
    """A tile, 0 outside of the rows and of k; no masks where all tiles lie inside."""
    if EVEN:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=row & inner, other=0.0)
    return tile


@triton.jit(do_not_specialize=["M"])
def matmul_any(
    a,
    b,
    c,
    bias,
    counter,
    M,
    N,
    width,
    a_row,
    a_k,
    b_row,
    b_k,
    stride_c,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    REPEAT: tl.constexpr,
    CONTINUE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SWAPPED: tl.constexpr,
    OUT_BF16: tl.constexpr,
):
    """One tile of c [segments, M, N] a program, for any strides; axis 1 of the grid is the segment, `width` wide.

    SWAPPED computes the transposed tile, b times a^T: few rows of c then fill the narrow side of the matrix unit.
    """
    count_launch(counter)
    tiles_n = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    segment = tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    if REPEAT:  # rows past the end are the last one again: they are not stored, and loads need no masks
        a_rows = a + tl.minimum(rows, M - 1).to(tl.int64) * a_row + segment.to(tl.int64) * width * a_k
    else:
        a_rows = a + rows.to(tl.int64) * a_row + segment.to(tl.int64) * width * a_k
    b_rows = b + columns.to(tl.int64) * b_row + segment.to(tl.int64) * width * b_k
    a_held = rows < M
    b_held = columns < N
    where = c + (segment.to(tl.int64) * M + rows.to(tl.int64))[:, None] * stride_c + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if SWAPPED:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if CONTINUE:
        start = tl.load(where, mask=inside, other=0.0)
        acc = start.T if SWAPPED else start
    for step in range(tl.cdiv(width, BLOCK_K)):
        at = step * BLOCK_K + k
        offset = at.to(tl.int64)
        inner = at < width
        if SWAPPED:
            left = _load(b_rows[:, None] + offset[None, :] * b_k, b_held[:, None], inner[None, :], EVEN)
            right = _load(a_rows[None, :] + offset[:, None] * a_k, a_held[None, :], inner[:, None], EVEN)
        else:
            left = _load(a_rows[:, None] + offset[None, :] * a_k, a_held[:, None], inner[None, :], EVEN)
            right = _load(b_rows[None, :] + offset[:, None] * b_k, b_held[None, :], inner[:, None], EVEN)
        acc = tl.dot(left, right, acc)
    total = acc.T if SWAPPED else acc
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    tl.store(where, rounded(total, OUT_BF16), mask=inside)


@triton.jit(do_not_specialize=["elements"])
def add_segments(partials, c, bias, counter, elements, N, SEGMENTS: tl.constexpr, HAS_BIAS: tl.constexpr,
                 OUT_BF16: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """c [M, N] = the balanced tree over partials fp32 [SEGMENTS, M, N], plus bias, rounded."""
    count_launch(counter)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    source = partials + at
    total = _pair_sum(source, inside, elements, 0, SEGMENTS)
    if HAS_BIAS:
        total += tl.load(bias + at % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(c + at, rounded(total, OUT_BF16), mask=inside)


@triton.jit
def _pair_sum(source, inside, elements, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The tree over COUNT neighbours that begin at FIRST."""
    if COUNT == 1:
        total = tl.load(source + FIRST * elements, mask=inside, other=0.0)
    else:
        left = _pair_sum(source, inside, elements, FIRST, COUNT // 2)
        total = left + _pair_sum(source, inside, elements, FIRST + COUNT // 2, COUNT // 2)
    return total


@triton.jit(do_not_specialize=["M"])
def matmul_fma(
    a,
    b,
    c,
    bias,
    counter,
    M,
    N,
    width,
    a_row,
    a_k,
    b_row,
    b_k,
    stride_c,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CONTINUE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUT_BF16: tl.constexpr,
):
    """`matmul_any` in the arithmetic fma32: one fused multiply-add per k on the vector units."""
    count_launch(counter)
    tiles_n = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    segment = tl.program_id(1)
    a_rows = a + tl.where(rows < M, rows, 0).to(tl.int64) * a_row + segment.to(tl.int64) * width * a_k
    b_rows = b + tl.where(columns < N, columns, 0).to(tl.int64) * b_row + segment.to(tl.int64) * width * b_k
    where = c + (segment.to(tl.int64) * M + rows.to(tl.int64))[:, None] * stride_c + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if CONTINUE:
        acc = tl.load(where, mask=inside, other=0.0)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(width):
        x = tl.load(a_rows + k.to(tl.int64) * a_k).to(tl.float32)
        y = tl.load(b_rows + k.to(tl.int64) * b_k).to(tl.float32)
        acc = tl.fma(
            tl.broadcast_to(x[:, None], (BLOCK_M, BLOCK_N)), tl.broadcast_to(y[None, :], (BLOCK_M, BLOCK_N)), acc
        )
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    tl.store(where, rounded(acc, OUT_BF16), mask=inside)


@triton.jit(do_not_specialize=["M"])
def column_sums(x, buffer, counter, M, N, stride, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """buffer [N] fp32 + the rows of x [M, N] bf16, one after the other."""
    count_launch(counter)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    total = tl.load(buffer + at, mask=inside, other=0.0)
    for first in range(0, M, ROWS):
        for step in tl.static_range(ROWS):
            row = first + step
            value = tl.load(x + row.to(tl.int64) * stride + at, mask=inside & (row < M), other=0.0).to(tl.float32)
            total = tl.where(row < M, total + value, total)
    tl.store(buffer + at, tl.where(total != total, float("nan"), total), mask=inside)
