"""Packed forward on Hopper: the schedule of triton_forward.py with specialised warps.

One warp copies tiles of keys and values ahead. Two groups of four warps own half of the rows each and keep the matrix
unit busy: the scores of the next tile are computed while the weights of this one are.
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
from samebits.ops.attention.gluon_split import fold_pair
from samebits.ops.attention.triton_softmax import TILES, larger, rescaling_of, weight_of

ROWS = gl.constexpr(64)  # of one group of warps
KEYS = gl.constexpr(64)


@gluon.jit
def zeros_past(v_tile, inside_until, D: gl.constexpr):
    """+0 in the rows of a tile of values from `inside_until` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    values = v_tile.load(layout)
    inside = gl.arange(0, KEYS, gl.SliceLayout(1, layout)) < inside_until
    v_tile.store(gl.where(inside[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def weights_of(s, m, c, first_key, position, MASKED: gl.constexpr, mma: gl.constexpr):
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
def folded_of(p):
    """The lanes of the row sum of a tile."""
    return fold_pair(fold_pair(fold_pair(p, ROWS, 64), ROWS, 32), ROWS, 16)


@gluon.jit
def merged_of(total_m, total_l, total, m, lanes, acc, reached, wide: gl.constexpr):
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
def _consume(
    group, queries, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns, q, out, m_out, l_out, begin, count,
    length,
    shift, first, head, tiles, whole, q_token, q_head, c,
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
    total_m = gl.full((ROWS,), float("-inf"), gl.float32, rows)
    total_l = gl.zeros((ROWS,), gl.float32, rows)
    total = gl.zeros((ROWS, D), gl.float32, wide)
    nothing = gl.zeros((ROWS, KEYS), gl.float32, mma)
    least = gl.full((ROWS,), float("-inf"), gl.float32, rows)
    empty = folded_of(nothing)

    mbarrier.wait(k_ready.index(0), 0)
    s = warpgroup_mma(own, k_tiles.index(0).permute((1, 0)), nothing, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    gl.thread_barrier()
    mbarrier.arrive(k_free.index(0), count=1)
    if whole > 0:
        m, a, p = weights_of(s, least, c, 0, position, False, mma)
    else:
        m, a, p = weights_of(s, least, c, 0, position, True, mma)
    # as after any tile: the factor is NaN where the maximum is not finite
    lanes = gl.fma(empty, gl.convert_layout(a, gl.SliceLayout(1, empty.type.layout))[:, None], folded_of(p))
    acc = gl.zeros((ROWS, D), gl.float32, wide) * gl.convert_layout(a, gl.SliceLayout(1, wide))[:, None]
    p16 = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, wide, 2))
    for tile in range(0, tiles):
        slot = tile % STAGES
        coming = gl.minimum(tile + 1, tiles - 1)  # past the last tile: the same again, for nothing
        k_slot = coming % STAGES
        ends = (tile % TILES == TILES - 1) | (tile == tiles - 1)
        mbarrier.wait(k_ready.index(k_slot), (coming // STAGES) & 1)
        # the groups take turns with the matrix unit, so that one computes weights while the other's products run
        mbarrier.wait(turns.index(group), tile & 1)
        s_next = warpgroup_mma(own, k_tiles.index(k_slot).permute((1, 0)), nothing, is_async=True)
        mbarrier.wait(v_ready.index(slot), (tile // STAGES) & 1)
        if tile * KEYS + KEYS > length:
            zeros_past(v_tiles.index(slot), length - tile * KEYS, D)
        product = warpgroup_mma(p16, v_tiles.index(slot), acc, is_async=True)
        mbarrier.arrive(turns.index(1 - group), count=1)
        s = warpgroup_mma_wait(1, deps=[s_next])
        gl.thread_barrier()
        mbarrier.arrive(k_free.index(k_slot), count=1)
        m_start = gl.where(ends, least, m)
        if coming < whole:
            m_next, a, p = weights_of(s, m_start, c, coming * KEYS, position, False, mma)
        else:
            m_next, a, p = weights_of(s, m_start, c, coming * KEYS, position, True, mma)
        folded = folded_of(p)
        acc = warpgroup_mma_wait(0, deps=[product])
        gl.thread_barrier()
        mbarrier.arrive(v_free.index(slot), count=1)
        if ends:
            reached = position >= tile // TILES * (TILES * KEYS)
            total_m, total_l, total = merged_of(total_m, total_l, total, m, lanes, acc, reached, wide)
            acc = gl.zeros((ROWS, D), gl.float32, wide)
            lanes = empty
        acc = acc * gl.convert_layout(a, gl.SliceLayout(1, wide))[:, None]
        lanes = gl.fma(lanes, gl.convert_layout(a, gl.SliceLayout(1, lanes.type.layout))[:, None], folded)
        m = m_next
        p16 = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, wide, 2))

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
def _produce(
    keys, values, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, start, head, tiles,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    for tile in range(0, tiles):
        slot = tile % STAGES
        free = ((tile // STAGES) & 1) ^ 1
        mbarrier.wait(k_free.index(slot), free)
        mbarrier.expect(k_ready.index(slot), KEYS * D * 2)
        tma.async_copy_global_to_shared(keys, [start + tile * KEYS, head * D], k_ready.index(slot), k_tiles.index(slot))
        mbarrier.wait(v_free.index(slot), free)
        mbarrier.expect(v_ready.index(slot), KEYS * D * 2)
        tma.async_copy_global_to_shared(
            values, [start + tile * KEYS, head * D], v_ready.index(slot), v_tiles.index(slot)
        )


@gluon.jit
def find_block(
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
    keys, values, q, out, m_out, l_out, rows_of, keys_of, counter, tokens, B, q_token, q_head, c,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BATCH: gl.constexpr, STATISTICS: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """As forward_rows of triton_forward.py for packed keys whose query rows are the last ones of their sequence."""
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], gl.bfloat16)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    count_launch(counter)
    head = gl.program_id(0) % HEADS
    b, first = find_block(gl.program_id(0) // HEADS, rows_of, B, GROUP, 2 * ROWS, BATCH)
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
    start = gl.load(keys_of + b)
    length = gl.load(keys_of + b + 1) - start
    shift = length - count
    lowest = first // GROUP + shift
    highest = gl.minimum((first + 2 * ROWS - 1) // GROUP, count - 1) + shift
    tiles = highest // KEYS + 1
    whole = gl.minimum((lowest + 1) // KEYS, tiles - 1)

    queries = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, D], tile)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, D], tile)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, D], tile)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    mbarrier.arrive(turns.index(0), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=2)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0, queries, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns, q, out, m_out, l_out,
                    begin, count, length, shift, first, head, tiles, whole, q_token, q_head, c, HEADS, GROUP, D,
                    STATISTICS, STAGES,
                ),
            ),
            (
                _consume,
                (
                    1, queries, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns, q, out, m_out, l_out,
                    begin, count, length, shift, first, head, tiles, whole, q_token, q_head, c, HEADS, GROUP, D,
                    STATISTICS, STAGES,
                ),
            ),
            (
                _produce,
                (
                    keys, values, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, start, head, tiles, D, STAGES,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
