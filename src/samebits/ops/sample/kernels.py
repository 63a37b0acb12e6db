"""Triton kernels of the draw: whole numbers of 128 bits as two halves, sums of integers in any order."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from samebits.arithmetic.triton import count_launch
from samebits.ops.logprob import contract
from samebits.ops.logprob.kernels import scaled_of, term_of

TOP_LIMIT = tl.constexpr(contract.TOP_LIMIT)
NO_TOKEN = tl.constexpr(-1)

# the kernels below spell out 4 windows of 16 exponents
assert (contract.WINDOWS, contract.WINDOW_BITS) == (4, 16)


@triton.jit
def window_of(logits, at, held, warmth, top):
    """(terms q << (i mod 16) as int64, which window below `top` they belong to) of the columns `at`."""
    raw = tl.load(logits + at, mask=held, other=0.0)
    q, i = term_of(scaled_of(raw, warmth, True))
    return q.to(tl.int64) << (i & 15).to(tl.int64), tl.where(held, top - (i >> 4), -1)


@triton.jit
def whole_of(s0, s1, s2, s3):
    """((s0 2^16 + s1) 2^16 + s2) 2^16 + s3 as (high, low) halves of 64 bits; each s is below 2^62."""
    low = s3.to(tl.uint64, bitcast=True)
    high = tl.zeros_like(low)
    high, low = _plus(high, low, s2.to(tl.uint64, bitcast=True), 16)
    high, low = _plus(high, low, s1.to(tl.uint64, bitcast=True), 32)
    return _plus(high, low, s0.to(tl.uint64, bitcast=True), 48)


@triton.jit
def _plus(high, low, s, BY: tl.constexpr):
    total = low + (s << BY)
    return high + (s >> (64 - BY)) + (total < low).to(tl.uint64), total


@triton.jit
def random_of(seed, position):
    """R: 64 random bits, Philox4x32-10 of (position) under (seed)."""
    a = (position & 0xFFFFFFFF).to(tl.uint32)
    b = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c = a * 0
    d = a * 0
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        left = a.to(tl.uint64) * 0xD2511F53
        right = c.to(tl.uint64) * 0xCD9E8D57
        a = (right >> 32).to(tl.uint32) ^ b ^ k0
        b = right.to(tl.uint32)
        c = (left >> 32).to(tl.uint32) ^ d ^ k1
        d = left.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return (b.to(tl.uint64) << 32) | a.to(tl.uint64)


@triton.jit(do_not_specialize=["columns", "stride", "blocks"])
def block_sums(logits, temperatures, states, sums, highest, counter, columns, stride, blocks, BLOCK: tl.constexpr):
    """sums int64 [rows, blocks, 4]: a block's terms by window of its row's state; highest fp32 [rows, blocks]."""
    count_launch(counter)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    held = at < columns
    source = logits + row * stride
    value, under = window_of(source, at, held, tl.load(temperatures + row), tl.load(states + row * 5).to(tl.int32))
    place = row * blocks + block
    for k in tl.static_range(4):
        tl.store(sums + place * 4 + k, tl.sum(tl.where(under == k, value, 0)))
    tl.store(highest + place, tl.max(tl.load(source + at, mask=held, other=float("-inf"))))


@triton.jit
def _running(sums, blocks, at, K: tl.constexpr):
    return tl.load(sums + at * 4 + K, mask=at < blocks, other=0)


@triton.jit(do_not_specialize=["columns", "stride", "blocks"])
def choose(
    logits, temperatures, greedy, states, sums, highest, seeds, positions, tokens, counter, columns, stride, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """tokens int64 [rows]: NO_TOKEN without a distribution; of a greedy row the lowest id among the largest logits;
    else the first id whose running total exceeds floor(S R / 2^64)."""
    count_launch(counter)
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride
    top = tl.load(states + row * 5).to(tl.int32)
    every = tl.arange(0, BLOCKS)
    if (top < -TOP_LIMIT) | (top >= TOP_LIMIT):
        tl.store(tokens + row, tl.full((), NO_TOKEN, tl.int64))
    elif tl.load(greedy + row) != 0:
        peaks = tl.load(highest + row * blocks + every, mask=every < blocks, other=float("-inf"))
        peak = tl.max(peaks)
        block = tl.min(tl.where(peaks == peak, every, BLOCKS))
        at = block * BLOCK + tl.arange(0, BLOCK)
        raw = tl.load(source + at, mask=at < columns, other=float("-inf"))
        tl.store(tokens + row, tl.min(tl.where(raw == peak, at, 2147483647)).to(tl.int64))
    else:
        s0 = tl.load(states + row * 5 + 1)
        s1 = tl.load(states + row * 5 + 2)
        s2 = tl.load(states + row * 5 + 3)
        s3 = tl.load(states + row * 5 + 4)
        high, low = whole_of(s0, s1, s2, s3)
        bits = random_of(tl.load(seeds + row), tl.load(positions + row))
        # floor(S R / 2^64): below S, so it has two halves
        wanted_low = high * bits + tl.umulhi(low, bits)
        wanted_high = tl.umulhi(high, bits) + (wanted_low < high * bits).to(tl.uint64)

        own = sums + row * blocks * 4
        b0 = _running(own, blocks, every, 0)
        b1 = _running(own, blocks, every, 1)
        b2 = _running(own, blocks, every, 2)
        b3 = _running(own, blocks, every, 3)
        high, low = whole_of(tl.cumsum(b0), tl.cumsum(b1), tl.cumsum(b2), tl.cumsum(b3))
        over = (high > wanted_high) | ((high == wanted_high) & (low > wanted_low))
        block = tl.min(tl.where(over, every, BLOCKS))
        before = every < block

        at = block * BLOCK + tl.arange(0, BLOCK)
        held = at < columns
        value, under = window_of(source, at, held, tl.load(temperatures + row), top)
        high, low = whole_of(
            tl.cumsum(tl.where(under == 0, value, 0)) + tl.sum(tl.where(before, b0, 0)),
            tl.cumsum(tl.where(under == 1, value, 0)) + tl.sum(tl.where(before, b1, 0)),
            tl.cumsum(tl.where(under == 2, value, 0)) + tl.sum(tl.where(before, b2, 0)),
            tl.cumsum(tl.where(under == 3, value, 0)) + tl.sum(tl.where(before, b3, 0)),
        )
        over = (high > wanted_high) | ((high == wanted_high) & (low > wanted_low))
        tl.store(tokens + row, tl.min(tl.where(over, at, 2147483647)).to(tl.int64))
