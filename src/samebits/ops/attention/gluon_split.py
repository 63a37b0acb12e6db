"""Decode on Hopper: the schedule of triton_split.py with one warp per program and keys copied by the tensor engine.

A step takes the 16 keys of one matrix instruction, so pages of any multiple of 16 tokens can be copied as they lie.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2, tma

from samebits.arithmetic.triton import count_launch, round_bf16_of
from samebits.ops.attention.triton_softmax import TILES, add_pair, larger, rescaling_of, weight_of


@gluon.jit
def fold_pair(x, ROWS: gl.constexpr, FROM: gl.constexpr):
    """[ROWS, FROM] -> [ROWS, FROM / 2]: the upper half of the columns is added onto the lower half."""
    return gl.reduce(gl.reshape(x, (ROWS, 2, FROM // 2)), 1, add_pair)


@gluon.jit
def rows_of_tile(table, length, head, first_key, HEADS: gl.constexpr, SIZE: gl.constexpr):
    """The rows of the cache, seen as [pages * HEADS * SIZE, 2 D], where the four groups of 16 keys begin."""
    k1 = gl.where(first_key + 16 < length, first_key + 16, first_key)
    k2 = gl.where(first_key + 32 < length, first_key + 32, first_key)
    k3 = gl.where(first_key + 48 < length, first_key + 48, first_key)
    r0 = (gl.load(table + first_key // SIZE) * HEADS + head) * SIZE + first_key % SIZE
    r1 = (gl.load(table + k1 // SIZE) * HEADS + head) * SIZE + k1 % SIZE
    r2 = (gl.load(table + k2 // SIZE) * HEADS + head) * SIZE + k2 % SIZE
    r3 = (gl.load(table + k3 // SIZE) * HEADS + head) * SIZE + k3 % SIZE
    return r0, r1, r2, r3


@gluon.jit
def _copy_box(cache, row, ready, k_box, v_box, D: gl.constexpr):
    tma.async_copy_global_to_shared(cache, [row, 0], ready, k_box)
    tma.async_copy_global_to_shared(cache, [row, D], ready, v_box)


@gluon.jit
def _copy_tile(cache, rows, ready, k_buffers, v_buffers, slot, D: gl.constexpr):
    barrier = ready.index(slot)
    mbarrier.expect(barrier, 2 * 64 * D * 2)
    _copy_box(cache, rows[0], barrier, k_buffers.index(slot * 4), v_buffers.index(slot * 4), D)
    _copy_box(cache, rows[1], barrier, k_buffers.index(slot * 4 + 1), v_buffers.index(slot * 4 + 1), D)
    _copy_box(cache, rows[2], barrier, k_buffers.index(slot * 4 + 2), v_buffers.index(slot * 4 + 2), D)
    _copy_box(cache, rows[3], barrier, k_buffers.index(slot * 4 + 3), v_buffers.index(slot * 4 + 3), D)


@gluon.jit
def _scores(qt, k_box, ROWS: gl.constexpr, mma: gl.constexpr):
    kt = k_box.permute((1, 0)).load(gl.DotOperandLayout(1, mma, 2))
    return mma_v2(qt, kt, gl.zeros((ROWS, 16), gl.float32, mma))


@gluon.jit
def _top(s0, s1, s2, s3):
    return gl.reduce(larger(larger(s0, s1), larger(s2, s3)), 1, larger)


@gluon.jit
def _add(acc, p, v_box, first_key, length, MASKED: gl.constexpr, mma: gl.constexpr):
    values: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    vt = v_box.load(values)
    if MASKED:
        inside = first_key + gl.arange(0, 16, gl.SliceLayout(1, values)) < length
        vt = gl.where(inside[:, None], vt, gl.zeros_like(vt))
    return mma_v2(gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, mma, 2)), vt, acc)


@gluon.jit
def _tile(
    m, lanes, acc, qt, k_buffers, v_buffers, slot, first_key, length, position, c,
    ROWS: gl.constexpr, MASKED: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """The state after one tile, as tile_of in triton_softmax.py."""
    s0 = _scores(qt, k_buffers.index(slot * 4), ROWS, mma)
    s1 = _scores(qt, k_buffers.index(slot * 4 + 1), ROWS, mma)
    s2 = _scores(qt, k_buffers.index(slot * 4 + 2), ROWS, mma)
    s3 = _scores(qt, k_buffers.index(slot * 4 + 3), ROWS, mma)
    j = first_key + gl.arange(0, 16, gl.SliceLayout(0, mma))
    if MASKED:
        ok0 = j[None, :] <= position[:, None]
        ok1 = j[None, :] + 16 <= position[:, None]
        ok2 = j[None, :] + 32 <= position[:, None]
        ok3 = j[None, :] + 48 <= position[:, None]
        least: gl.constexpr = float("-inf")
        top = _top(
            gl.where(ok0, s0, least), gl.where(ok1, s1, least), gl.where(ok2, s2, least), gl.where(ok3, s3, least)
        )
    else:
        top = _top(s0, s1, s2, s3)
    m_next = larger(m, top * c)
    a = rescaling_of(m, m_next)
    minus = -m_next[:, None]
    p0 = weight_of(gl.fma(s0, c, minus))
    p1 = weight_of(gl.fma(s1, c, minus))
    p2 = weight_of(gl.fma(s2, c, minus))
    p3 = weight_of(gl.fma(s3, c, minus))
    if MASKED:
        a = gl.where(position >= first_key, a, 1.0)
        p0 = gl.where(ok0, p0, 0.0)
        p1 = gl.where(ok1, p1, 0.0)
        p2 = gl.where(ok2, p2, 0.0)
        p3 = gl.where(ok3, p3, 0.0)
    folded = fold_pair((p0 + p2) + (p1 + p3), ROWS, 16)
    lanes = gl.fma(lanes, gl.convert_layout(a, gl.SliceLayout(1, lanes.type.layout))[:, None], folded)
    acc = acc * a[:, None]
    acc = _add(acc, p0, v_buffers.index(slot * 4), first_key, length, MASKED, mma)
    acc = _add(acc, p1, v_buffers.index(slot * 4 + 1), first_key + 16, length, MASKED, mma)
    acc = _add(acc, p2, v_buffers.index(slot * 4 + 2), first_key + 32, length, MASKED, mma)
    acc = _add(acc, p3, v_buffers.index(slot * 4 + 3), first_key + 48, length, MASKED, mma)
    return m_next, lanes, acc


@gluon.jit
def _store(
    m, lanes, acc, m_out, l_out, acc_out, out, to, ok, D: gl.constexpr, ROWS: gl.constexpr, DIRECT: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    lsum = fold_pair(fold_pair(fold_pair(lanes, ROWS, 8), ROWS, 4), ROWS, 2)
    lsum = gl.convert_layout(gl.reshape(lsum, (ROWS,)), gl.SliceLayout(1, mma))
    d = gl.arange(0, D, gl.SliceLayout(0, mma))
    if DIRECT:
        rounded = round_bf16_of(acc * gl.div_rn(1.0, lsum)[:, None])
        gl.store(out + to[:, None] * D + d[None, :], rounded, mask=ok[:, None])
    else:
        gl.store(m_out + to, m, mask=ok)
        gl.store(l_out + to, lsum, mask=ok)
        gl.store(acc_out + to[:, None] * D + d[None, :], acc, mask=ok[:, None])


@gluon.jit(do_not_specialize=["held", "splits"])
def chunk_states(
    cache, q, out, m_out, l_out, acc_out, rows_of, lengths, table, counter, held, splits, q_token, q_head, table_stride,
    c,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SIZE: gl.constexpr, ROWS: gl.constexpr,
    BY_REQUEST: gl.constexpr, DIRECT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As chunk_states of triton_split.py for one block of at most ROWS (token, head) rows per request."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    boxes: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, D], gl.bfloat16)
    count_launch(counter)
    head = gl.program_id(0) % HEADS
    b = gl.program_id(0) // HEADS
    split = gl.program_id(1)
    begin = gl.load(rows_of + b)
    count = gl.load(rows_of + b + 1) - begin
    length = gl.load(lengths + b)
    tiles = (length + 63) // 64
    chunks = (tiles + TILES - 1) // TILES
    own = (chunks - split + splits - 1) // splits
    if (count <= 0) | (count * GROUP > ROWS) | (own <= 0):
        return
    steps = own * TILES
    if split + (own - 1) * splits == chunks - 1:
        steps -= chunks * TILES - tiles
    table += b.to(gl.int64) * table_stride

    k_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 4, 16, D], boxes)
    v_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 4, 16, D], boxes)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        if stage < steps:
            first = ((split + stage // TILES * splits) * TILES + stage % TILES) * 64
            _copy_tile(
                cache, rows_of_tile(table, length, head, first, HEADS, SIZE), ready, k_buffers, v_buffers, stage, D
            )

    rows: gl.constexpr = gl.SliceLayout(1, mma)
    r = gl.arange(0, ROWS, rows)
    ok = r < count * GROUP
    token = gl.minimum(r // GROUP, count - 1)
    position = token + (length - count)
    at = ((begin + token).to(gl.int64) * HEADS + head) * GROUP + r % GROUP
    if BY_REQUEST:
        state_at = ((b * (ROWS // GROUP) + token).to(gl.int64) * HEADS + head) * GROUP + r % GROUP
    else:
        state_at = at
    all_rows = held.to(gl.int64) * (HEADS * GROUP)
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])
    lr = gl.arange(0, ROWS, gl.SliceLayout(1, loads))
    ld = gl.arange(0, D, gl.SliceLayout(0, loads))
    ltoken = begin + gl.minimum(lr // GROUP, count - 1)
    q += (ltoken.to(gl.int64) * q_token + (head * GROUP + lr % GROUP) * q_head)[:, None] + ld[None, :]
    qt = gl.convert_layout(gl.load(q, mask=(lr < count * GROUP)[:, None], other=0.0), gl.DotOperandLayout(0, mma, 2))

    m = gl.full((ROWS,), float("-inf"), gl.float32, rows)
    acc = gl.zeros((ROWS, D), gl.float32, mma)
    empty = fold_pair(gl.zeros((ROWS, 16), gl.float32, mma), ROWS, 16)
    lanes = empty
    for step in range(0, steps):
        slot = step % STAGES
        ahead = step + STAGES
        more = ahead < steps
        coming = gl.where(more, ahead, step)
        first = ((split + coming // TILES * splits) * TILES + coming % TILES) * 64
        sources = rows_of_tile(table, length, head, first, HEADS, SIZE)
        chunk = split + step // TILES * splits
        first_key = (chunk * TILES + step % TILES) * 64
        mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
        if first_key + 63 <= length - count:  # every row attends to every key
            m, lanes, acc = _tile(
                m, lanes, acc, qt, k_buffers, v_buffers, slot, first_key, length, position, c, ROWS, False, mma
            )
        else:
            m, lanes, acc = _tile(
                m, lanes, acc, qt, k_buffers, v_buffers, slot, first_key, length, position, c, ROWS, True, mma
            )
        gl.thread_barrier()
        if more:
            _copy_tile(cache, sources, ready, k_buffers, v_buffers, slot, D)
        if (step % TILES == TILES - 1) | (step == steps - 1):
            to = at if DIRECT else chunk.to(gl.int64) * all_rows + state_at
            _store(m, lanes, acc, m_out, l_out, acc_out, out, to, ok, D, ROWS, DIRECT, mma)
            m = gl.full((ROWS,), float("-inf"), gl.float32, rows)
            lanes = empty
            acc = gl.zeros((ROWS, D), gl.float32, mma)
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(stage))
