"""The gradient of the weight on NVIDIA: norm_weight_gradient of triton.py with rows that are copied far ahead.

A warp owns 32 columns and adds row after row; the rows to come are on their way to shared memory meanwhile.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from samebits.arithmetic.triton import count_launch

COLUMNS = gl.constexpr(32)


@gluon.jit
def _copy(dy, x, scale, left, dy_row, x_row, slot, tiles, ROWS: gl.constexpr):
    """Start copying ROWS rows, `left` of them there, into a slot of the tiles."""
    pieces: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
    factors: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, pieces))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, pieces))[None, :]
    number = gl.arange(0, ROWS, factors)
    dy_tiles, x_tiles, scales = tiles
    there = row < left
    async_copy.async_copy_global_to_shared(dy_tiles.index(slot), dy + row * dy_row + column, mask=there)
    async_copy.async_copy_global_to_shared(x_tiles.index(slot), x + row * x_row + column, mask=there)
    async_copy.async_copy_global_to_shared(scales.index(slot), scale + number, mask=number < left)
    async_copy.commit_group()


@gluon.jit
def _half(x, ROWS: gl.constexpr):
    """The upper and the lower rows of x [ROWS, COLUMNS], which a thread has all of: nothing moves."""
    return gl.split(gl.permute(gl.reshape(x, (2, ROWS // 2, COLUMNS)), (1, 2, 0)))


@gluon.jit
def _add(acc, dy, normed, left, FIRST: gl.constexpr, ROWS: gl.constexpr, MASKED: gl.constexpr):
    """acc after ROWS more rows, one after the other; where MASKED, those from `left` on are not added."""
    if ROWS == 1:
        d = gl.convert_layout(gl.reshape(dy, (COLUMNS,)), acc.type.layout, assert_trivial=True)
        n = gl.convert_layout(gl.reshape(normed, (COLUMNS,)), acc.type.layout, assert_trivial=True)
        longer = gl.fma(d, n, acc)
        return gl.where(left > FIRST, longer, acc) if MASKED else longer
    else:
        dy_first, dy_then = _half(dy, ROWS)
        first, then = _half(normed, ROWS)
        acc = _add(acc, dy_first, first, left, FIRST, ROWS // 2, MASKED)
        return _add(acc, dy_then, then, left, FIRST + ROWS // 2, ROWS // 2, MASKED)


@gluon.jit
def _bits(x):
    """bf16 as whole registers: halves of registers would be moved about."""
    return x.to(gl.uint16, bitcast=True).to(gl.uint32)


@gluon.jit
def _value(bits):
    return (bits << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _load(slot, tiles, ROWS: gl.constexpr):
    """A slot in registers: (dy, x, scale) of ROWS rows, a column to each thread."""
    own: gl.constexpr = gl.BlockedLayout([ROWS, 1], [1, 32], [1, 1], [0, 1])
    dy_tiles, x_tiles, scales = tiles
    return (
        _bits(dy_tiles.index(slot).load(own)),
        _bits(x_tiles.index(slot).load(own)),
        scales.index(slot).load(gl.SliceLayout(1, own)),
    )


@gluon.jit
def _add_tile(acc, rows, left, ROWS: gl.constexpr, MASKED: gl.constexpr):
    dy, x, scale = rows
    return _add(acc, _value(dy), _value(x) * scale[:, None], left, 0, ROWS, MASKED)


@gluon.jit(do_not_specialize=["rows"])
def add_rows(dy, x, scale, dw, counter, rows, dy_row, x_row, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """dw[i] goes on as a chain of fma over rows, ascending; a program owns COLUMNS elements."""
    count_launch(counter)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = (
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, COLUMNS], plain),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, COLUMNS], plain),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], line),
    )
    first = gl.program_id(0) * COLUMNS
    dy += first
    x += first
    for stage in gl.static_range(STAGES):
        _copy(dy, x, scale, rows - stage * ROWS, dy_row, x_row, stage, tiles, ROWS)
        dy += ROWS * dy_row
        x += ROWS * x_row
        scale += ROWS
    own: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    at = first + gl.arange(0, COLUMNS, own)
    acc = gl.load(dw + at)
    whole = rows // ROWS
    async_copy.wait_group(STAGES - 1)
    here = _load(0, tiles, ROWS)
    for step in range(0, whole):
        # the next rows are loaded before these are added: each would wait for its own otherwise
        async_copy.wait_group(STAGES - 2)
        coming = _load((step + 1) % STAGES, tiles, ROWS)
        _copy(dy, x, scale, rows - (step + STAGES) * ROWS, dy_row, x_row, step % STAGES, tiles, ROWS)
        dy += ROWS * dy_row
        x += ROWS * x_row
        scale += ROWS
        acc = _add_tile(acc, here, rows, ROWS, False)
        here = coming
    acc = _add_tile(acc, here, rows - whole * ROWS, ROWS, True)
    async_copy.wait_group(0)
    gl.store(dw + at, gl.where(acc != acc, float("nan"), acc))
