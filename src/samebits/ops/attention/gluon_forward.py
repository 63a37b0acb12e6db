"""The forward on Hopper, for packed keys or pages: the schedule of triton_forward.py with specialised warps.

One warp copies tiles of keys and values ahead. Two groups of four warps own half of the rows each and keep the matrix
unit busy: the scores of the next tile are computed while the weights of this one are. The keys of a tile and the values
of the tile before it arrive, and are given back, together. Whole tiles have a loop without masks of their own, and the
last tile's values come after it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from samebits.arithmetic.triton import count_launch, round_bf16_of
from samebits.ops.attention.gluon_split import fold_pair, rows_of_tile
from samebits.ops.attention.triton_softmax import TILES, larger, rescaling_of, weight_of

ROWS = gl.constexpr(64)  # of one group of warps
KEYS = gl.constexpr(64)


@gluon.jit
def _zeros_past(v_tile, inside_until, D: gl.constexpr):
    """+0 in the rows of a tile of values from `inside_until` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    values = v_tile.load(layout)
    inside = gl.arange(0, KEYS, gl.SliceLayout(1, layout)) < inside_until
    v_tile.store(gl.where(inside[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _weights_of(s, m, c, first_key, position, MASKED: gl.constexpr, mma: gl.constexpr):
    """(m', a, p) of a tile."""
    if MASKED:
        valid = first_key + gl.arange(0, KEYS, gl.SliceLayout(0, mma))[None, :] <= position[:, None]
        top = gl.reduce(gl.where(valid, s, float("-inf")), 1, larger)
    else:
        top = gl.reduce(s, 1, larger)
    m_next = larger(m, top * c)
    a = rescaling_of(m, m_next)
    p = weight_of(gl.fma(s, c, -m_next[:, None]))
    if MASKED:
        a = gl.where(position >= first_key, a, 1.0)
        p = gl.where(valid, p, 0.0)
    return m_next, a, p


@gluon.jit
def _folded_of(p):
    """The lanes of the row sum of a tile."""
    return fold_pair(fold_pair(fold_pair(p, ROWS, 64), ROWS, 32), ROWS, 16)


@gluon.jit
def _merged_of(total_m, total_l, total, m, lanes, acc, reached, wide: gl.constexpr):
    """The total after a chunk, where the chunk reaches the row."""
    lsum = fold_pair(fold_pair(fold_pair(lanes, ROWS, 8), ROWS, 4), ROWS, 2)
    lsum = gl.convert_layout(gl.reshape(lsum, (ROWS,)), total_l.type.layout)
    m_next = larger(total_m, m)
    a = rescaling_of(total_m, m_next)
    b = rescaling_of(m, m_next)
    a_wide = gl.convert_layout(a, gl.SliceLayout(1, wide))[:, None]
    b_wide = gl.convert_layout(b, gl.SliceLayout(1, wide))[:, None]
    here = gl.convert_layout(reached, gl.SliceLayout(1, wide))[:, None]
    total = gl.where(here, gl.fma(total, a_wide, acc * b_wide), total)
    total_l = gl.where(reached, gl.fma(total_l, a, lsum * b), total_l)
    return gl.where(reached, m_next, total_m), total_l, total


@gluon.jit
def _steps(
    begin_tile, end_tile, own, pairs, m, lanes, acc, p16, a_total, position, c, wide: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Products with the values of the tiles begin_tile .. end_tile, while the weights of the tile after each are made.

    `pairs`: (tiles of keys, tiles of values, ready, free); the keys of tile t + 1 lie beside the values of tile t.
    `a_total`: (m, l, acc) over whole chunks.
    """
    k_tiles, v_tiles, ready, free = pairs
    total_m, total_l, total = a_total
    rows: gl.constexpr = total_m.type.layout
    mma: gl.constexpr = rows.parent
    nothing = gl.zeros((ROWS, KEYS), gl.float32, mma)
    least = gl.full((ROWS,), float("-inf"), gl.float32, rows)
    for tile in range(begin_tile, end_tile):
        slot = tile % STAGES
        ends = tile % TILES == TILES - 1
        s_next = warpgroup_mma(own, k_tiles.index(slot).permute((1, 0)), nothing, is_async=True)
        product = warpgroup_mma(p16, v_tiles.index(slot), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_next])
        m_next, a, p = _weights_of(s, gl.where(ends, least, m), c, (tile + 1) * KEYS, position, MASKED, mma)
        folded = _folded_of(p)
        # for the next step; a loop here also keeps the assembler from waiting for the product before the weights
        mbarrier.wait(ready.index((tile + 1) % STAGES), ((tile + 1) // STAGES) & 1)
        acc = warpgroup_mma_wait(0, deps=[product])
        gl.thread_barrier()
        mbarrier.arrive(free.index(slot), count=1)
        if ends:
            reached = position >= tile // TILES * (TILES * KEYS)
            total_m, total_l, total = _merged_of(total_m, total_l, total, m, lanes, acc, reached, wide)
            acc = gl.zeros((ROWS, D), gl.float32, wide)
            lanes = gl.zeros_like(lanes)
        acc = acc * gl.convert_layout(a, gl.SliceLayout(1, wide))[:, None]
        lanes = gl.fma(lanes, gl.convert_layout(a, gl.SliceLayout(1, lanes.type.layout))[:, None], folded)
        m = m_next
        p16 = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, wide, 2))
    return m, lanes, acc, p16, (total_m, total_l, total)


@gluon.jit
def _consume(
    group, queries, first_keys, first_ready, pairs, q, out, m_out, l_out, begin, count, length, shift, first, head,
    tiles, whole, q_token, q_head, c,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, STATISTICS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    rows: gl.constexpr = gl.SliceLayout(1, mma)
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    first += group * ROWS
    own = queries.index(group)
    lr = first + gl.arange(0, ROWS, gl.SliceLayout(1, loads))
    ld = gl.arange(0, D, gl.SliceLayout(0, loads))
    ltoken = (begin + gl.minimum(lr // GROUP, count - 1)).to(gl.int64)
    source = q + (ltoken * q_token + (head * GROUP + lr % GROUP) * q_head)[:, None] + ld[None, :]
    own.store(gl.load(source, mask=(lr < count * GROUP)[:, None], other=0.0))
    fence_async_shared()
    gl.thread_barrier()

    r = first + gl.arange(0, ROWS, rows)
    position = gl.minimum(r // GROUP, count - 1) + shift
    least = gl.full((ROWS,), float("-inf"), gl.float32, rows)
    a_total = (least, gl.zeros((ROWS,), gl.float32, rows), gl.zeros((ROWS, D), gl.float32, wide))
    nothing = gl.zeros((ROWS, KEYS), gl.float32, mma)

    mbarrier.wait(first_ready, 0)
    s = warpgroup_mma(own, first_keys.permute((1, 0)), nothing, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    m, a, p = _weights_of(s, least, c, 0, position, True, mma)
    # as after any tile: the factor is NaN where the maximum is not finite
    empty = _folded_of(nothing)
    lanes = gl.fma(empty, gl.convert_layout(a, gl.SliceLayout(1, empty.type.layout))[:, None], _folded_of(p))
    acc = gl.zeros((ROWS, D), gl.float32, wide) * gl.convert_layout(a, gl.SliceLayout(1, wide))[:, None]
    p16 = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, wide, 2))
    _, v_tiles, ready, _ = pairs
    mbarrier.wait(ready.index(0), 0)
    unmasked = gl.maximum(whole - 1, 0)  # steps after which every row attends to every key of the tile to come
    m, lanes, acc, p16, a_total = _steps(
        0, unmasked, own, pairs, m, lanes, acc, p16, a_total, position, c, wide, D, STAGES, False
    )
    m, lanes, acc, p16, a_total = _steps(
        unmasked, tiles - 1, own, pairs, m, lanes, acc, p16, a_total, position, c, wide, D, STAGES, True
    )
    last = tiles - 1
    values = v_tiles.index(last % STAGES)
    if tiles * KEYS > length:
        _zeros_past(values, length - last * KEYS, D)
    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(p16, values, acc, is_async=True)])
    total_m, total_l, total = a_total
    reached = position >= last // TILES * (TILES * KEYS)
    total_m, total_l, total = _merged_of(total_m, total_l, total, m, lanes, acc, reached, wide)

    ok = r < count * GROUP
    at = ((begin + gl.minimum(r // GROUP, count - 1)).to(gl.int64) * HEADS + head) * GROUP + r % GROUP
    if STATISTICS:
        gl.store(m_out + at, total_m, mask=ok)
        gl.store(l_out + at, total_l, mask=ok)
    inverse = gl.convert_layout(gl.div_rn(1.0, total_l), gl.SliceLayout(1, wide))
    # by way of shared memory, so that threads store 16 bytes at a time; the rows that a thread stores are others than
    # those of q that it loaded, whose places would be held in registers until here
    own.store(round_bf16_of(total * inverse[:, None]))
    gl.thread_barrier()
    stores: gl.constexpr = gl.BlockedLayout([D // 16, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    sr = first + gl.arange(0, ROWS, gl.SliceLayout(1, stores))
    sd = gl.arange(0, D, gl.SliceLayout(0, stores))
    to = ((begin + sr // GROUP).to(gl.int64) * HEADS + head) * GROUP + sr % GROUP
    gl.store(out + to[:, None] * D + sd[None, :], own.load(stores), mask=(sr < count * GROUP)[:, None])


@gluon.jit
def _copy_keys(source, tile, barrier, to, start, length, table, head, HEADS: gl.constexpr, SIZE: gl.constexpr,
               D: gl.constexpr, FROM: gl.constexpr):  # fmt: skip
    """Start copying a tile of keys (FROM 0) or values (FROM D of a row in pages) into shared memory."""
    if SIZE == 0:
        tma.async_copy_global_to_shared(source, [start + tile * KEYS, head * D], barrier, to)
    else:
        # columns 64 at a time, as the tile lies in shared memory, and of each the four groups of 16 keys
        boxes = to._reinterpret(
            gl.bfloat16, [D // 16, 16, 64], gl.NVMMASharedLayout.get_default_for([16, 64], gl.bfloat16)
        )
        found = rows_of_tile(table, length, head, tile * KEYS, HEADS, SIZE)
        for part in gl.static_range(D // 64):
            for box in gl.static_range(4):
                tma.async_copy_global_to_shared(
                    source, [found[box], FROM + part * 64], barrier, boxes.index(part * 4 + box)
                )


@gluon.jit
def _produce(
    keys, values, first_keys, first_ready, pairs, start, length, table, head, tiles,
    HEADS: gl.constexpr, SIZE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    k_tiles, v_tiles, ready, free = pairs
    mbarrier.expect(first_ready, KEYS * D * 2)
    _copy_keys(keys, 0, first_ready, first_keys, start, length, table, head, HEADS, SIZE, D, 0)
    for tile in range(0, tiles - 1):
        slot = tile % STAGES
        mbarrier.wait(free.index(slot), ((tile // STAGES) & 1) ^ 1)
        barrier = ready.index(slot)
        mbarrier.expect(barrier, 2 * KEYS * D * 2)
        _copy_keys(keys, tile + 1, barrier, k_tiles.index(slot), start, length, table, head, HEADS, SIZE, D, 0)
        _copy_keys(values, tile, barrier, v_tiles.index(slot), start, length, table, head, HEADS, SIZE, D, D)
    last = tiles - 1
    slot = last % STAGES
    mbarrier.wait(free.index(slot), ((last // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(slot), KEYS * D * 2)
    _copy_keys(values, last, ready.index(slot), v_tiles.index(slot), start, length, table, head, HEADS, SIZE, D, D)


@gluon.jit
def _find_block(
    block, rows_of, B, GROUP: gl.constexpr, BLOCK: gl.constexpr, BATCH: gl.constexpr, LEAST: gl.constexpr = 1
):
    """As find_rows of triton_rows.py for sequences of at least LEAST rows, the last block of a sequence first."""
    at = gl.arange(0, BATCH, gl.BlockedLayout([1], [32], [4], [0]))
    begin = gl.load(rows_of + at, mask=at < B, other=0)
    end = gl.load(rows_of + at + 1, mask=at < B, other=0)
    blocks = ((end - begin) * GROUP + BLOCK - 1) // BLOCK
    if LEAST > 1:
        blocks = gl.where((end - begin) * GROUP >= LEAST, blocks, 0)
    ends = gl.associative_scan(blocks, 0, _add)
    total = gl.sum(blocks, 0)
    b = gl.sum((ends <= block).to(gl.int32), 0)
    own = gl.sum(gl.where(at == b, ends, 0), 0) - 1 - block
    found = block < total
    return gl.where(found, b, -1), gl.where(found, own * BLOCK, block - total)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit(do_not_specialize=["tokens", "B"])
def forward_rows(
    keys, values, q, out, m_out, l_out, rows_of, keys_of, table, counter, tokens, B, q_token, q_head, table_stride, c,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BATCH: gl.constexpr, SIZE: gl.constexpr,
    LEAST: gl.constexpr, STATISTICS: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """As forward_rows of triton_forward.py where the query rows are the last ones of their sequence.

    SIZE 0: `keys` and `values` copy 64 packed rows of all heads. Else both copy 16 rows and 64 columns of a cache,
    seen as [pages * HEADS * SIZE, 2 D].
    """
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], gl.bfloat16)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    count_launch(counter)
    head = gl.program_id(0) % HEADS
    b, first = _find_block(gl.program_id(0) // HEADS, rows_of, B, GROUP, 2 * ROWS, BATCH, LEAST)
    if b < 0:  # rows outside every sequence
        plain: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
        row = gl.load(rows_of + B) * GROUP + first * (2 * ROWS) + gl.arange(0, 2 * ROWS, gl.SliceLayout(1, plain))
        ok = row // GROUP < tokens
        to = ((row // GROUP).to(gl.int64) * HEADS + head) * GROUP + row % GROUP
        d = gl.arange(0, D, gl.SliceLayout(0, plain))
        gl.store(out + to[:, None] * D + d[None, :], gl.zeros((2 * ROWS, D), gl.bfloat16, plain), mask=ok[:, None])
        if STATISTICS:
            zero = gl.zeros((2 * ROWS,), gl.float32, gl.SliceLayout(1, plain))
            gl.store(m_out + to, zero, mask=ok)
            gl.store(l_out + to, zero, mask=ok)
        return
    begin = gl.load(rows_of + b)
    count = gl.load(rows_of + b + 1) - begin
    if SIZE == 0:
        start = gl.load(keys_of + b)
        length = gl.load(keys_of + b + 1) - start
        pages = rows_of  # not read
    else:
        start = 0
        length = gl.load(keys_of + b)
        pages = table + b.to(gl.int64) * table_stride
    shift = length - count
    lowest = first // GROUP + shift
    highest = gl.minimum((first + 2 * ROWS - 1) // GROUP, count - 1) + shift
    tiles = highest // KEYS + 1
    whole = gl.minimum((lowest + 1) // KEYS, tiles - 1)

    queries = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, D], tile)
    first_keys = gl.allocate_shared_memory(gl.bfloat16, [KEYS, D], tile)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, D], tile)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, D], tile)
    first_ready = gl.allocate_shared_memory(gl.int64, [1], bars)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    mbarrier.init(first_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    pairs = (k_tiles, v_tiles, ready, free)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0, queries, first_keys, first_ready, pairs, q, out, m_out, l_out, begin, count, length, shift,
                    first, head, tiles, whole, q_token, q_head, c, HEADS, GROUP, D, STATISTICS, STAGES,
                ),
            ),
            (
                _consume,
                (
                    1, queries, first_keys, first_ready, pairs, q, out, m_out, l_out, begin, count, length, shift,
                    first, head, tiles, whole, q_token, q_head, c, HEADS, GROUP, D, STATISTICS, STAGES,
                ),
            ),
            (
                _produce,
                (
                    keys, values, first_keys, first_ready, pairs, start, length, pages, head, tiles, HEADS, SIZE, D,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
