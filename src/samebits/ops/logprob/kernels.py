"""Triton kernels of the order-free log-sum-exp: integers per row, in any order, then one fixed conversion."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from samebits.arithmetic import primitives
from samebits.arithmetic.triton import count_launch, exp2_core_of, exp2_of
from samebits.ops.logprob import contract

LOG2_E = tl.constexpr(primitives.LOG2_E)
LOG2_E_LOW = tl.constexpr(contract.LOG2_E_LOW)
T_LIMIT = tl.constexpr(contract.T_LIMIT)
TOP_LIMIT = tl.constexpr(contract.TOP_LIMIT)
EMPTY_TOP = tl.constexpr(contract.EMPTY_TOP)
LN_2 = tl.constexpr(contract.LN_2)
SQRT_2 = tl.constexpr(contract.SQRT_2)
ATANH_TERMS = tl.constexpr(contract.ATANH_TERMS)
ALL_INTEGERS = tl.constexpr(2.0**23)  # from here on every fp32 is an integer
ROUNDER = tl.constexpr(1.5 * 2.0**23)  # adding it leaves no fraction bits
ROUNDER_BITS = tl.constexpr(0x4B400000)
SMALL_BITS = tl.constexpr(0x49800000)  # of 2^20
NO_TARGET = tl.constexpr(-1)

# the kernels below spell out 4 windows of 16 exponents
assert (contract.WINDOWS, contract.WINDOW_BITS) == (4, 16)


@triton.jit
def scaled_of(logit, temperature, DIVIDE: tl.constexpr):
    """z = logit / temperature; no division at 1."""
    if DIVIDE:
        z = tl.div_rn(logit, tl.broadcast_to(temperature, logit.shape))
    else:
        z = logit
    return z


@triton.jit
def term_of(z):
    """2^(z log2 e) as (q, i), int32: the term is q * 2^(i - 23), q of 24 bits."""
    t = z * LOG2_E
    # as selections, so that NaN goes to the upper limit
    t = tl.where(t < T_LIMIT, t, T_LIMIT)
    t = tl.where(t > -T_LIMIT, t, -T_LIMIT)
    size = tl.abs(t)
    n = tl.where(size < ALL_INTEGERS, (size + ALL_INTEGERS) - ALL_INTEGERS, size)
    n = tl.where(t < 0, -n, n)
    return _significand_and_exponent(z, n, n.to(tl.int32))


@triton.jit
def small_term_of(z):
    """`term_of` for |z| < 2^20: no limits to keep, and the nearest integer by one addition."""
    shifted = z * LOG2_E + ROUNDER
    return _significand_and_exponent(z, shifted - ROUNDER, shifted.to(tl.int32, bitcast=True) - ROUNDER_BITS)


@triton.jit
def _significand_and_exponent(z, n, exponent):
    r = tl.fma(z, tl.full(z.shape, LOG2_E, tl.float32), -n)
    r = tl.fma(z, tl.full(z.shape, LOG2_E_LOW, tl.float32), r)
    r = tl.where(r < 0.5, r, 0.5)
    r = tl.where(r > -0.5, r, -0.5)
    bits = exp2_core_of(r).to(tl.int32, bitcast=True)
    return (bits & 0x7FFFFF) | 0x800000, exponent + (bits >> 23) - 127


@triton.jit
def lowered(s0, s1, s2, s3, by):
    """The four window sums counted from a top that is higher `by` windows."""
    zero = tl.zeros_like(s0)
    t0 = tl.where(by == 0, s0, zero)
    t1 = tl.where(by == 0, s1, tl.where(by == 1, s0, zero))
    t2 = tl.where(by == 0, s2, tl.where(by == 1, s1, tl.where(by == 2, s0, zero)))
    t3 = tl.where(by == 0, s3, tl.where(by == 1, s2, tl.where(by == 2, s1, tl.where(by == 3, s0, zero))))
    return t0, t1, t2, t3


@triton.jit(do_not_specialize=["rows", "splits", "first_column", "first_split", "all_splits"])
def row_states(
    logits,
    temperatures,
    temperature,
    targets,
    picked,
    states,
    counter,
    rows,
    columns,
    stride,
    width,
    splits,
    first_column,
    first_split,
    all_splits,
    PER_ROW: tl.constexpr,
    DIVIDE: tl.constexpr,
    PICK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """states int64 [rows, all_splits, 5] from `first_split` on: one for each `width` columns of logits [rows, columns].

    PICK: `picked` [rows, 6] gets in its last place the bits of the target's z where these columns hold it (they are
    `first_column ..` of the vocabulary).
    """
    count_launch(counter)
    for index in range(tl.program_id(0), rows * splits, tl.num_programs(0)):
        row = index // splits
        split = index % splits
        source = logits + row.to(tl.int64) * stride
        warmth = tl.load(temperatures + row) if PER_ROW else temperature
        top = tl.full((), EMPTY_TOP, tl.int32)
        s0 = tl.zeros((), dtype=tl.int64)
        s1 = tl.zeros((), dtype=tl.int64)
        s2 = tl.zeros((), dtype=tl.int64)
        s3 = tl.zeros((), dtype=tl.int64)
        end = tl.minimum((split + 1) * width, columns)
        for start in range(split * width, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            held = at < end
            z = scaled_of(tl.load(source + at, mask=held, other=0.0), warmth, DIVIDE)
            if tl.max(z.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < SMALL_BITS:
                q, i = small_term_of(z)
            else:
                q, i = term_of(z)
            window = tl.where(held, i >> 4, EMPTY_TOP)
            value = q.to(tl.int64) << (i & 15).to(tl.int64)
            own_top = tl.max(window)
            lowest = tl.min(tl.where(held, window, own_top))
            higher = tl.maximum(top, own_top)
            s0, s1, s2, s3 = lowered(s0, s1, s2, s3, higher - top)
            top = higher
            # only the windows that occur in this block
            for under in range(top - own_top, tl.minimum(top - lowest, 3) + 1):
                total = tl.sum(tl.where(window == top - under, value, 0))
                s0 += tl.where(under == 0, total, 0)
                s1 += tl.where(under == 1, total, 0)
                s2 += tl.where(under == 2, total, 0)
                s3 += tl.where(under == 3, total, 0)
        out = states + (row.to(tl.int64) * all_splits + first_split + split) * 5
        tl.store(out, top.to(tl.int64))
        tl.store(out + 1, s0)
        tl.store(out + 2, s1)
        tl.store(out + 3, s2)
        tl.store(out + 4, s3)
        if PICK:
            target = tl.load(targets + row) - first_column
            if (split == 0) & (target >= 0) & (target < columns):
                z = scaled_of(tl.load(source + target + tl.arange(0, 1)), warmth, DIVIDE)
                bits = z.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
                tl.store(picked + row.to(tl.int64) * 6 + 5 + tl.arange(0, 1), bits)


@triton.jit(do_not_specialize=["splits"])
def merge_states(states, out, counter, splits, out_stride, BLOCK: tl.constexpr):
    """out [rows, 5 of out_stride] = the state of all splits of states [rows, splits, 5], splits <= BLOCK."""
    count_launch(counter)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK)
    source = states + (row * splits + split) * 5
    held = split < splits
    tops = tl.load(source, mask=held, other=EMPTY_TOP)
    s0 = tl.load(source + 1, mask=held, other=0)
    s1 = tl.load(source + 2, mask=held, other=0)
    s2 = tl.load(source + 3, mask=held, other=0)
    s3 = tl.load(source + 4, mask=held, other=0)
    top = tl.max(tops)
    s0, s1, s2, s3 = lowered(s0, s1, s2, s3, top - tops)
    target = out + row * out_stride
    tl.store(target, top)
    tl.store(target + 1, tl.sum(s0))
    tl.store(target + 2, tl.sum(s1))
    tl.store(target + 3, tl.sum(s2))
    tl.store(target + 4, tl.sum(s3))


@triton.jit
def lse64_of(top, s0, s1, s2, s3):
    """The log-sum-exp of a state in float64, by +, -, *, / alone; -inf or NaN where there is none."""
    total = s0.to(tl.float64) * 65536.0 + s1.to(tl.float64)
    total = total * 65536.0 + s2.to(tl.float64)
    total = total * 65536.0 + s3.to(tl.float64)
    bits = total.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1023
    m = ((bits & ((1 << 52) - 1)) | (1023 << 52)).to(tl.float64, bitcast=True)
    high = m > SQRT_2
    m = tl.where(high, m * 0.5, m)
    exponent = exponent + high.to(tl.int64) + 16 * (top - 3) - 23
    f = (m - 1.0) / (m + 1.0)
    square = f * f
    series = tl.full(m.shape, 1.0 / (2 * ATANH_TERMS - 1), tl.float64)
    for k in tl.static_range(ATANH_TERMS - 1):
        series = series * square + 1.0 / (2 * (ATANH_TERMS - 2 - k) + 1)
    lse = exponent.to(tl.float64) * LN_2 + (2.0 * f) * series
    lse = tl.where(top < -TOP_LIMIT, -float("inf"), lse)
    return tl.where(top >= TOP_LIMIT, float("nan"), lse)


@triton.jit
def load_lse64(states, row, held):
    source = states + row.to(tl.int64) * 5
    top = tl.load(source, mask=held, other=0)
    s0 = tl.load(source + 1, mask=held, other=1)
    s1 = tl.load(source + 2, mask=held, other=0)
    s2 = tl.load(source + 3, mask=held, other=0)
    s3 = tl.load(source + 4, mask=held, other=0)
    return lse64_of(top, s0, s1, s2, s3)


@triton.jit(do_not_specialize=["rows"])
def finish_lse(states, out, counter, rows, BLOCK: tl.constexpr):
    """out fp32 [rows] = the log-sum-exp of states [rows, 5]."""
    count_launch(counter)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lse = load_lse64(states, row, row < rows).to(tl.float32)
    tl.store(out + row, tl.where(lse != lse, float("nan"), lse), mask=row < rows)


@triton.jit(do_not_specialize=["count"])
def finish_logp(
    states,
    z,
    logits,
    targets,
    temperatures,
    temperature,
    out,
    counter,
    count,
    per_row,
    columns,
    stride,
    GIVEN: tl.constexpr,
    PER_ROW: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out fp32 [rows, per_row] = z - lse, at most +0; z is given or picked from logits (+0 where there is none)."""
    count_launch(counter)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = at < count
    row = at // per_row
    if GIVEN:
        value = tl.load(z + at, mask=held, other=0.0)
        known = held
    else:
        target = tl.load(targets + at, mask=held, other=0)
        known = held & (target >= 0) & (target < columns)
        logit = tl.load(logits + row.to(tl.int64) * stride + target, mask=known, other=0.0)
        if PER_ROW:
            value = tl.div_rn(logit, tl.load(temperatures + row, mask=held, other=1.0))
        else:
            value = scaled_of(logit, temperature, DIVIDE)
    lse = load_lse64(states, row, held)
    logp = (value.to(tl.float64) - lse).to(tl.float32)
    logp = tl.where(logp > 0, 0.0, logp)
    undefined = (logp != logp) | (lse != lse) | (tl.abs(lse) == float("inf"))
    logp = tl.where(undefined, float("nan"), logp)
    tl.store(out + at, tl.where(known, logp, 0.0), mask=held)


@triton.jit(do_not_specialize=["rows", "first_column"])
def logit_gradient(
    logits,
    upstream,
    lse,
    targets,
    temperatures,
    temperature,
    dz,
    counter,
    rows,
    columns,
    stride,
    dz_stride,
    first_column,
    PER_ROW: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dz bf16 = upstream * (onehot - 2^((z - lse) log2 e)) / temperature for logits [rows, columns]."""
    count_launch(counter)
    blocks = tl.cdiv(columns, BLOCK)
    for index in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        row = index // blocks
        at = (index % blocks) * BLOCK + tl.arange(0, BLOCK)
        held = at < columns
        warmth = tl.load(temperatures + row) if PER_ROW else temperature
        z = scaled_of(tl.load(logits + row.to(tl.int64) * stride + at, mask=held, other=0.0), warmth, DIVIDE)
        probability = exp2_of((z - tl.load(lse + row)) * LOG2_E)
        onehot = tl.where(at == tl.load(targets + row) - first_column, 1.0, 0.0)
        gradient = scaled_of(tl.load(upstream + row) * (onehot - probability), warmth, DIVIDE)
        tl.store(dz + row.to(tl.int64) * dz_stride + at, gradient.to(tl.bfloat16), mask=held)
