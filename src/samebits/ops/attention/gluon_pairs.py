"""A third schedule of the forward on Hopper, for packed keys or pages: as gluon_forward.py, with fewer waits.

The keys of a tile and the values of the tile before it arrive, and are given back, together, so a step of 64 keys waits
once and hands back once. Whole tiles have a loop without masks of their own, and the last tile's values come after it.
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
from samebits.ops.attention.gluon_forward import KEYS, ROWS, find_block, folded_of, merged_of, weights_of, zeros_past
from samebits.ops.attention.gluon_split import rows_of_tile
from samebits.ops.attention.triton_softmax import TILES


@gluon.jit
def _steps(
    begin_tile, end_tile, group, own, pairs, m, lanes, acc, p16, a_total, position, c, wide: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Products with the values of the tiles begin_tile .. end_tile, while the weights of the tile after each are made.

    `pairs`: (tiles of keys, tiles of values, ready, free); the keys of tile t + 1 lie beside the values of tile t.
    `a_total`: (m, l, acc) over whole chunks.
    """
    k_tiles, v_tiles, ready, free, turns = pairs
    total_m, total_l, total = a_total
    rows: gl.constexpr = total_m.type.layout
    mma: gl.constexpr = rows.parent
    nothing = gl.zeros((ROWS, KEYS), gl.float32, mma)
    least = gl.full((ROWS,), float("-inf"), gl.float32, rows)
    for tile in range(begin_tile, end_tile):
        slot = tile % STAGES
        ends = tile % TILES == TILES - 1
        if TURNS:
            mbarrier.wait(turns.index(group), tile & 1)
        s_next = warpgroup_mma(own, k_tiles.index(slot).permute((1, 0)), nothing, is_async=True)
        product = warpgroup_mma(p16, v_tiles.index(slot), acc, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index(1 - group), count=1)
        s = warpgroup_mma_wait(1, deps=[s_next])
        m_next, a, p = weights_of(s, gl.where(ends, least, m), c, (tile + 1) * KEYS, position, MASKED, mma)
        folded = folded_of(p)
        # for the next step; a loop here also keeps the assembler from waiting for the product before the weights
        mbarrier.wait(ready.index((tile + 1) % STAGES), ((tile + 1) // STAGES) & 1)
        acc = warpgroup_mma_wait(0, deps=[product])
        gl.thread_barrier()
        mbarrier.arrive(free.index(slot), count=1)
        if ends:
            reached = position >= tile // TILES * (TILES * KEYS)
            total_m, total_l, total = merged_of(total_m, total_l, total, m, lanes, acc, reached, wide)
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
    TURNS: gl.constexpr,
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
    if whole > 0:
        m, a, p = weights_of(s, least, c, 0, position, False, mma)
    else:
        m, a, p = weights_of(s, least, c, 0, position, True, mma)
    # as after any tile: the factor is NaN where the maximum is not finite
    empty = folded_of(nothing)
    lanes = gl.fma(empty, gl.convert_layout(a, gl.SliceLayout(1, empty.type.layout))[:, None], folded_of(p))
    acc = gl.zeros((ROWS, D), gl.float32, wide) * gl.convert_layout(a, gl.SliceLayout(1, wide))[:, None]
    p16 = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, wide, 2))
    _, v_tiles, ready, _, _ = pairs
    mbarrier.wait(ready.index(0), 0)
    unmasked = gl.maximum(whole - 1, 0)  # steps after which every row attends to every key of the tile to come
    m, lanes, acc, p16, a_total = _steps(
        0, unmasked, group, own, pairs, m, lanes, acc, p16, a_total, position, c, wide, D, STAGES, TURNS, False
    )
    m, lanes, acc, p16, a_total = _steps(
        unmasked, tiles - 1, group, own, pairs, m, lanes, acc, p16, a_total, position, c, wide, D, STAGES, TURNS, True
    )
    last = tiles - 1
    values = v_tiles.index(last % STAGES)
    if tiles * KEYS > length:
        zeros_past(values, length - last * KEYS, D)
    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(p16, values, acc, is_async=True)])
    total_m, total_l, total = a_total
    reached = position >= last // TILES * (TILES * KEYS)
    total_m, total_l, total = merged_of(total_m, total_l, total, m, lanes, acc, reached, wide)

    ok = r < count * GROUP
    at = ((begin + gl.minimum(r // GROUP, count - 1)).to(gl.int64) * HEADS + head) * GROUP + r % GROUP
    if STATISTICS:
        gl.store(m_out + at, total_m, mask=ok)
        gl.store(l_out + at, total_l, mask=ok)
    inverse = gl.convert_layout(gl.div_rn(1.0, total_l), gl.SliceLayout(1, wide))
    to = gl.convert_layout(at, gl.SliceLayout(1, wide))[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, wide))[None, :]
    there = gl.convert_layout(ok, gl.SliceLayout(1, wide))[:, None]
    gl.store(out + to, round_bf16_of(total * inverse[:, None]), mask=there)


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
    k_tiles, v_tiles, ready, free, _ = pairs
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


@gluon.jit(do_not_specialize=["tokens", "B"])
def forward_rows(
    keys, values, q, out, m_out, l_out, rows_of, keys_of, table, counter, tokens, B, q_token, q_head, table_stride, c,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BATCH: gl.constexpr, SIZE: gl.constexpr,
    LEAST: gl.constexpr, STATISTICS: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
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
    b, first = find_block(gl.program_id(0) // HEADS, rows_of, B, GROUP, 2 * ROWS, BATCH, LEAST)
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
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    mbarrier.arrive(turns.index(0), count=1)
    pairs = (k_tiles, v_tiles, ready, free, turns)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0, queries, first_keys, first_ready, pairs, q, out, m_out, l_out, begin, count, length, shift,
                    first, head, tiles, whole, q_token, q_head, c, HEADS, GROUP, D, STATISTICS, STAGES, TURNS,
                ),
            ),
            (
                _consume,
                (
                    1, queries, first_keys, first_ready, pairs, q, out, m_out, l_out, begin, count, length, shift,
                    first, head, tiles, whole, q_token, q_head, c, HEADS, GROUP, D, STATISTICS, STAGES, TURNS,
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
