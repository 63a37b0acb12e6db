"""The gradient of the weight on Hopper: norm_weight_gradient of triton.py with rows that are copied far ahead.

A program owns 32 columns. Four warps multiply rows by their factors; a fifth adds them, one after the other.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from samebits.arithmetic.triton import count_launch

COLUMNS = gl.constexpr(32)
PIECE = gl.constexpr(32)  # rows that the adding warp holds
PIECES = gl.constexpr(4)  # that are handed over together
ROWS = gl.constexpr(128)


@gluon.jit
def _copy(dy, x, scale, left, dy_row, x_row, slot, tiles):
    """Start copying ROWS rows, `left` of them there, into a slot of the tiles."""
    parts: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    factors: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, parts))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, parts))[None, :]
    number = gl.arange(0, ROWS, factors)
    dy_tiles, x_tiles, scales = tiles
    async_copy.async_copy_global_to_shared(dy_tiles.index(slot), dy + row * dy_row + column, mask=row < left)
    async_copy.async_copy_global_to_shared(x_tiles.index(slot), x + row * x_row + column, mask=row < left)
    async_copy.async_copy_global_to_shared(scales.index(slot), scale + number, mask=number < left)
    async_copy.commit_group()


@gluon.jit
def _prepare(dy, x, scale, rows, dy_row, x_row, tiles, made, ready, free, STAGES: gl.constexpr, SLOTS: gl.constexpr):
    own: gl.constexpr = gl.BlockedLayout([8, 1], [1, 32], [4, 1], [0, 1])
    dy_tiles, x_tiles, scales = tiles
    dy_made, normed_made = made
    for stage in gl.static_range(STAGES - 1):
        _copy(dy, x, scale, rows - stage * ROWS, dy_row, x_row, stage, tiles)
        dy += ROWS * dy_row
        x += ROWS * x_row
        scale += ROWS
    for step in range(0, (rows + ROWS - 1) // ROWS):
        async_copy.wait_group(STAGES - 2)
        coming = step + STAGES - 1
        _copy(dy, x, scale, rows - coming * ROWS, dy_row, x_row, coming % STAGES, tiles)
        dy += ROWS * dy_row
        x += ROWS * x_row
        scale += ROWS
        here = step % STAGES
        upstream = dy_tiles.index(here).load(own).to(gl.float32)
        normed = x_tiles.index(here).load(own).to(gl.float32) * scales.index(here).load(gl.SliceLayout(1, own))[:, None]
        slot = step % SLOTS
        mbarrier.wait(free.index(slot), ((step // SLOTS) & 1) ^ 1)
        dy_made.index(slot).store(gl.reshape(upstream, (PIECES, PIECE, COLUMNS)))
        normed_made.index(slot).store(gl.reshape(normed, (PIECES, PIECE, COLUMNS)))
        gl.thread_barrier()
        mbarrier.arrive(ready.index(slot), count=1)
    async_copy.wait_group(0)


@gluon.jit
def _half(x, COUNT: gl.constexpr):
    """The upper and the lower rows of x [COUNT, COLUMNS], which a thread has all of: nothing moves."""
    return gl.split(gl.permute(gl.reshape(x, (2, COUNT // 2, COLUMNS)), (1, 2, 0)))


@gluon.jit
def _add(acc, dy, normed, left, FIRST: gl.constexpr, COUNT: gl.constexpr, MASKED: gl.constexpr):
    """acc after COUNT more rows, one after the other; where MASKED, those from `left` on are not added."""
    if COUNT == 1:
        d = gl.convert_layout(gl.reshape(dy, (COLUMNS,)), acc.type.layout, assert_trivial=True)
        n = gl.convert_layout(gl.reshape(normed, (COLUMNS,)), acc.type.layout, assert_trivial=True)
        longer = gl.fma(d, n, acc)
        return gl.where(left > FIRST, longer, acc) if MASKED else longer
    else:
        dy_first, dy_then = _half(dy, COUNT)
        first, then = _half(normed, COUNT)
        acc = _add(acc, dy_first, first, left, FIRST, COUNT // 2, MASKED)
        return _add(acc, dy_then, then, left, FIRST + COUNT // 2, COUNT // 2, MASKED)


@gluon.jit
def _take(piece, last, made, ready, free, SLOTS: gl.constexpr):
    """(dy, normed) of a piece in registers, a column to each thread; past the last piece that one again."""
    own: gl.constexpr = gl.BlockedLayout([PIECE, 1], [1, 32], [1, 1], [0, 1])
    lines: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [0, 1])
    dy_made, normed_made = made
    dy_pieces = dy_made._reinterpret(gl.float32, [SLOTS * PIECES, PIECE, COLUMNS], lines)
    normed_pieces = normed_made._reinterpret(gl.float32, [SLOTS * PIECES, PIECE, COLUMNS], lines)
    piece = gl.minimum(piece, last)
    slot = (piece // PIECES) % SLOTS
    mbarrier.wait(ready.index(slot), (piece // PIECES // SLOTS) & 1)
    at = piece % (SLOTS * PIECES)
    dy = dy_pieces.index(at).load(own)
    normed = normed_pieces.index(at).load(own)
    if piece % PIECES == PIECES - 1:
        mbarrier.arrive(free.index(slot), count=1)
    return dy, normed


@gluon.jit
def _chain(dw, first, rows, made, ready, free, SLOTS: gl.constexpr):
    at = first + gl.arange(0, COLUMNS, gl.BlockedLayout([1], [32], [1], [0]))
    acc = gl.load(dw + at)
    last = (rows + PIECE - 1) // PIECE - 1
    pairs = rows // (2 * PIECE)
    # the next rows are loaded before these are added: each would wait for its own otherwise
    even = _take(0, last, made, ready, free, SLOTS)
    for pair in range(0, pairs):
        odd = _take(2 * pair + 1, last, made, ready, free, SLOTS)
        acc = _add(acc, even[0], even[1], rows, 0, PIECE, False)
        even = _take(2 * pair + 2, last, made, ready, free, SLOTS)
        acc = _add(acc, odd[0], odd[1], rows, 0, PIECE, False)
    left = rows - pairs * (2 * PIECE)
    odd = _take(2 * pairs + 1, last, made, ready, free, SLOTS)
    acc = _add(acc, even[0], even[1], left, 0, PIECE, True)
    acc = _add(acc, odd[0], odd[1], left, PIECE, PIECE, True)
    gl.store(dw + at, gl.where(acc != acc, float("nan"), acc))


@gluon.jit(do_not_specialize=["rows"])
def add_rows(dy, x, scale, dw, counter, rows, dy_row, x_row, STAGES: gl.constexpr, SLOTS: gl.constexpr):
    """dw[i] goes on as a chain of fma over rows (one or more), ascending; a program owns COLUMNS elements."""
    count_launch(counter)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = (
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, COLUMNS], plain),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, COLUMNS], plain),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], line),
    )
    # rows of a column side by side, so that a thread takes four at a time
    lines: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 2, 0])
    made = (
        gl.allocate_shared_memory(gl.float32, [SLOTS, PIECES, PIECE, COLUMNS], lines),
        gl.allocate_shared_memory(gl.float32, [SLOTS, PIECES, PIECE, COLUMNS], lines),
    )
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    first = gl.program_id(0) * COLUMNS
    gl.warp_specialize(
        [
            (_prepare, (dy + first, x + first, scale, rows, dy_row, x_row, tiles, made, ready, free, STAGES, SLOTS)),
            (_chain, (dw, first, rows, made, ready, free, SLOTS)),
        ],
        [1],
        [200],
    )
