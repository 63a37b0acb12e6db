"""Triton kernels that add fp32 partial sums of ranks along the contract's tree, alone or through memory of peers.

Every rank may write into every other rank's region, and reads its own only. How a block waits, and why nothing is
overwritten too early, is told in `peer_memory.py`. A block works on the tiles t with t % BLOCKS == block, whatever the
size of a call, so a place in a region belongs to one block for good, and each block counts its own generations.

What a kernel polls is read by volatile loads or by atomics; values of partial sums are only ever loaded, added in the
order that `_tree` writes down, and stored. A wait that the host broke off gives NaN.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from samebits.arithmetic.triton import count_launch, round_bf16_of

# Polls after which a waiting block tells the host about it, and looks whether the host gave up.
PATIENCE = tl.constexpr(1 << 14)
# Regions of 4-byte words: what comes to be added, and sums on their way to every rank.
INBOX, OUTBOX = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def _words_of(addresses, rank):
    """The int32 words of a rank's region whose address stands in a table."""
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _longs_of(addresses, rank):
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def _finish(total, bias, at, mask, columns, HAS_BIAS: tl.constexpr, OUT_BF16: tl.constexpr):
    """The finished fp32 sum (+ bias) of output `at`, rounded once where bf16 is wanted."""
    if HAS_BIAS:
        total = total + tl.load(bias + at % columns, mask=mask, other=0.0).to(tl.float32)
    if OUT_BF16:
        return round_bf16_of(total)
    else:
        return total


@triton.jit
def _stacked_tree(stacked, at, mask, n, FIRST: tl.constexpr, COUNT: tl.constexpr):
    if COUNT == 1:
        return tl.load(stacked + FIRST * n + at, mask=mask, other=0.0)
    else:
        left = _stacked_tree(stacked, at, mask, n, FIRST, COUNT // 2)
        return left + _stacked_tree(stacked, at, mask, n, FIRST + COUNT // 2, COUNT // 2)


@triton.jit
def fold_stacked(
    stacked, bias, out, counter, n, columns,
    RANKS: tl.constexpr, HAS_BIAS: tl.constexpr, OUT_BF16: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """stacked [RANKS, n] fp32 -> out [n]: the balanced tree over neighbouring rows."""
    count_launch(counter)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    row = tl.full((), 0, tl.int64) + n  # n may be a constant
    total = _stacked_tree(stacked, at, mask, row, 0, RANKS)
    tl.store(out + at, _finish(total, bias, at, mask, columns, HAS_BIAS, OUT_BF16), mask=mask)


@triton.jit
def _look(watch, generation, RANK: tl.constexpr):
    """Tell the host which rank is waited for; not 0 if the host gave up."""
    tl.store(watch + 1 + RANK, generation + 1)
    return tl.load(watch, volatile=True)


@triton.jit
def _receive(box, at, mask, mark, generation, watch, lost, RANK: tl.constexpr):
    """Wait for the marked values of one rank, take them, and leave the places empty."""
    word = tl.load(box + at, mask=mask, other=mark << 32, volatile=True)
    missing = tl.max(((word >> 32) != mark).to(tl.int32), 0)
    polls = 0
    while (missing != 0) & (lost == 0):
        word = tl.load(box + at, mask=mask, other=mark << 32, volatile=True)
        missing = tl.max(((word >> 32) != mark).to(tl.int32), 0)
        polls += 1
        if polls % PATIENCE == 0:
            lost = _look(watch, generation, RANK)
    tl.store(box + at, tl.zeros_like(word), mask=mask)
    value = word.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(lost != 0, float("nan"), value), lost


@triton.jit
def _arriving_tree(
    partial, box, at, mask, mark, generation, watch, lost,
    FIRST: tl.constexpr, COUNT: tl.constexpr, RANK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    if COUNT == 1:
        if FIRST == RANK:
            return tl.load(partial + at, mask=mask, other=0.0), lost
        else:
            return _receive(box + FIRST * ROOM, at, mask, mark, generation, watch, lost, FIRST)
    else:
        left, lost = _arriving_tree(
            partial, box, at, mask, mark, generation, watch, lost, FIRST, COUNT // 2, RANK, ROOM
        )
        right, lost = _arriving_tree(
            partial, box, at, mask, mark, generation, watch, lost, FIRST + COUNT // 2, COUNT // 2, RANK, ROOM
        )
        return left + right, lost


@triton.jit
def sum_small(
    partial, bias, out, n, columns, boxes, state, watch, counter,
    RANK: tl.constexpr, RANKS: tl.constexpr, HAS_BIAS: tl.constexpr, OUT_BF16: tl.constexpr,
    TILE: tl.constexpr, BLOCKS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The tree sum of partial [n] fp32 in one step: every value travels in 8 bytes with the mark of its generation.

    boxes: int64 [2, RANKS, ROOM] of every rank; row r is written by rank r.
    """
    count_launch(counter)
    block = tl.program_id(0)
    generation = tl.load(state + 2 * block)
    lost = tl.load(state + 2 * block + 1)
    mark = (generation & 0x3FFFFFFF) + 1
    half = (generation & 1) * (RANKS * ROOM)
    for start in range(block * TILE, n, BLOCKS * TILE):
        at = start + tl.arange(0, TILE)
        mask = at < n
        value = tl.load(partial + at, mask=mask, other=0.0).to(tl.int32, bitcast=True)
        word = (value.to(tl.int64) & 0xFFFFFFFF) | (mark << 32)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                tl.store(_longs_of(boxes, peer) + half + RANK * ROOM + at, word, mask=mask)
    own = _longs_of(boxes, RANK) + half
    for start in range(block * TILE, n, BLOCKS * TILE):
        at = start + tl.arange(0, TILE)
        mask = at < n
        total, lost = _arriving_tree(partial, own, at, mask, mark, generation, watch, lost, 0, RANKS, RANK, ROOM)
        tl.store(out + at, _finish(total, bias, at, mask, columns, HAS_BIAS, OUT_BF16), mask=mask)
    tl.store(state + 2 * block, generation + 1)
    tl.store(state + 2 * block + 1, lost)


@triton.jit
def _post(flags, generation, block, KIND: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCKS: tl.constexpr):
    """Tell this block of every other rank that what it was sent in this generation is there."""
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            place = _longs_of(flags, peer) + (KIND * RANKS + RANK) * BLOCKS + block
            tl.atomic_xchg(place, generation + 1, sem="release", scope="sys")


@triton.jit
def _await(
    flags, generation, block, watch, lost,
    KIND: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Wait until this block of every other rank has posted this generation."""
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            place = _longs_of(flags, RANK) + (KIND * RANKS + peer) * BLOCKS + block
            seen = tl.atomic_add(place, 0, sem="acquire", scope="sys")
            polls = 0
            while (seen <= generation) & (lost == 0):
                seen = tl.atomic_add(place, 0, sem="acquire", scope="sys")
                polls += 1
                if polls % PATIENCE == 0:
                    lost = _look(watch, generation, peer)
    tl.debug_barrier()
    return lost


@triton.jit
def _row(boxes, peer, half, row, KIND: tl.constexpr, RANKS: tl.constexpr, ROOM: tl.constexpr):
    return _words_of(boxes, peer) + ((KIND * 2 + half) * RANKS + row) * ROOM


@triton.jit
def _inbox_tree(
    partial, boxes, half, at, mask,
    FIRST: tl.constexpr, COUNT: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    if COUNT == 1:
        if FIRST == RANK:
            return tl.load(partial + at, mask=mask, other=0.0)
        else:
            came = _row(boxes, RANK, half, FIRST, INBOX, RANKS, ROOM).to(tl.pointer_type(tl.float32), bitcast=True)
            return tl.load(came + at, mask=mask, other=0.0, cache_modifier=".cg")
    else:
        left = _inbox_tree(partial, boxes, half, at, mask, FIRST, COUNT // 2, RANK, RANKS, ROOM)
        return left + _inbox_tree(partial, boxes, half, at, mask, FIRST + COUNT // 2, COUNT // 2, RANK, RANKS, ROOM)


@triton.jit
def _send_shares(
    partial, boxes, half, block, share, tail, stride,
    RANK: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            limit = share if peer < RANKS - 1 else tail
            to = _row(boxes, peer, half, RANK, INBOX, RANKS, ROOM).to(tl.pointer_type(tl.float32), bitcast=True)
            for start in range(block * TILE, limit, BLOCKS * TILE):
                at = start + tl.arange(0, TILE)
                tl.store(to + at, tl.load(partial + peer * stride + at, mask=at < limit, other=0.0), mask=at < limit)


@triton.jit
def _take_sums(
    out, boxes, half, block, share, tail, lost,
    RANK: tl.constexpr, RANKS: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    into = out.to(tl.pointer_type(BITS), bitcast=True)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            limit = share if peer < RANKS - 1 else tail
            came = _row(boxes, RANK, half, peer, OUTBOX, RANKS, ROOM)
            for start in range(block * TILE, limit, BLOCKS * TILE):
                at = start + tl.arange(0, TILE)
                place = (came + start).to(tl.pointer_type(BITS), bitcast=True) + tl.arange(0, TILE)
                value = tl.load(place, mask=at < limit, other=0, cache_modifier=".cg")
                # all bits set is a NaN
                tl.store(into + peer * share + at, tl.where(lost != 0, -1, value), mask=at < limit)


@triton.jit
def sum_large(
    partial, bias, out, share, tail, stride, columns, boxes, flags, state, watch, counter,
    RANK: tl.constexpr, RANKS: tl.constexpr, WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr, OUT_BF16: tl.constexpr,
    TILE: tl.constexpr, BLOCKS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The tree sum of partial fp32 in shares: rank r adds `share` values from r * stride on, the last one `tail`.

    WHOLE: shares, which stand side by side, come together again in `out` on every rank; otherwise `out` is this rank's
    own share, which with a stride of 0 is everything.
    boxes: int32 [2 kinds, 2 halves, RANKS, ROOM] of every rank, flags: int64 [2 kinds, RANKS, BLOCKS].
    """
    count_launch(counter)
    block = tl.program_id(0)
    generation = tl.load(state + 2 * block)
    lost = tl.load(state + 2 * block + 1)
    half = generation & 1
    _send_shares(partial, boxes, half, block, share, tail, stride, RANK, RANKS, TILE, BLOCKS, ROOM)
    _post(flags, generation, block, INBOX, RANK, RANKS, BLOCKS)
    lost = _await(flags, generation, block, watch, lost, INBOX, RANK, RANKS, BLOCKS)
    own = RANK * stride
    mine = out + own if WHOLE else out
    limit = share if RANK < RANKS - 1 else tail
    for start in range(block * TILE, limit, BLOCKS * TILE):
        at = start + tl.arange(0, TILE)
        mask = at < limit
        total = _inbox_tree(partial + own, boxes, half, at, mask, 0, RANKS, RANK, RANKS, ROOM)
        total = tl.where(lost != 0, float("nan"), total)
        result = _finish(total, bias, own + at, mask, columns, HAS_BIAS, OUT_BF16)
        tl.store(mine + at, result, mask=mask)
        if WHOLE:
            for peer in tl.static_range(RANKS):
                if peer != RANK:
                    # a tile keeps its place whatever the width of its values
                    tile = _row(boxes, peer, half, RANK, OUTBOX, RANKS, ROOM) + start
                    tl.store(tile.to(out.dtype, bitcast=True) + tl.arange(0, TILE), result, mask=mask)
    if WHOLE:
        _post(flags, generation, block, OUTBOX, RANK, RANKS, BLOCKS)
        lost = _await(flags, generation, block, watch, lost, OUTBOX, RANK, RANKS, BLOCKS)
        bits: tl.constexpr = tl.int16 if OUT_BF16 else tl.int32
        _take_sums(out, boxes, half, block, share, tail, lost, RANK, RANKS, bits, TILE, BLOCKS, ROOM)
    tl.store(state + 2 * block, generation + 1)
    tl.store(state + 2 * block + 1, lost)


@triton.jit
def gather_words(
    words, out, n, boxes, flags, state, watch, counter,
    RANK: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """words int32 [n] of every rank -> out [RANKS, n]; all bits set where a rank did not come."""
    count_launch(counter)
    block = tl.program_id(0)
    generation = tl.load(state + 2 * block)
    lost = tl.load(state + 2 * block + 1)
    half = generation & 1
    row = tl.full((), 0, tl.int64) + n  # n may be a constant
    for start in range(block * TILE, n, BLOCKS * TILE):
        at = start + tl.arange(0, TILE)
        value = tl.load(words + at, mask=at < n, other=0)
        tl.store(out + RANK * row + at, value, mask=at < n)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                tl.store(_row(boxes, peer, half, RANK, OUTBOX, RANKS, ROOM) + at, value, mask=at < n)
    _post(flags, generation, block, OUTBOX, RANK, RANKS, BLOCKS)
    lost = _await(flags, generation, block, watch, lost, OUTBOX, RANK, RANKS, BLOCKS)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            for start in range(block * TILE, n, BLOCKS * TILE):
                at = start + tl.arange(0, TILE)
                came = _row(boxes, RANK, half, peer, OUTBOX, RANKS, ROOM)
                value = tl.load(came + at, mask=at < n, other=0, cache_modifier=".cg")
                tl.store(out + peer * row + at, tl.where(lost != 0, -1, value), mask=at < n)
    tl.store(state + 2 * block, generation + 1)
    tl.store(state + 2 * block + 1, lost)
