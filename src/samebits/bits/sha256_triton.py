"""SHA-256 of every leaf of a tensor's bytes on a GPU (FIPS 180-4): one thread for each leaf."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.bits.tree import LEAF

_LEAVES = 128  # of one program
_START = (
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
)  # fmt: skip
_ROUNDS = (
    0x428A2F98, 0x71374491, 0xB5C0FBCF, 0xE9B5DBA5, 0x3956C25B, 0x59F111F1, 0x923F82A4, 0xAB1C5ED5,
    0xD807AA98, 0x12835B01, 0x243185BE, 0x550C7DC3, 0x72BE5D74, 0x80DEB1FE, 0x9BDC06A7, 0xC19BF174,
    0xE49B69C1, 0xEFBE4786, 0x0FC19DC6, 0x240CA1CC, 0x2DE92C6F, 0x4A7484AA, 0x5CB0A9DC, 0x76F988DA,
    0x983E5152, 0xA831C66D, 0xB00327C8, 0xBF597FC7, 0xC6E00BF3, 0xD5A79147, 0x06CA6351, 0x14292967,
    0x27B70A85, 0x2E1B2138, 0x4D2C6DFC, 0x53380D13, 0x650A7354, 0x766A0ABB, 0x81C2C92E, 0x92722C85,
    0xA2BFE8A1, 0xA81A664B, 0xC24B8B70, 0xC76C51A3, 0xD192E819, 0xD6990624, 0xF40E3585, 0x106AA070,
    0x19A4C116, 0x1E376C08, 0x2748774C, 0x34B0BCB5, 0x391C0CB3, 0x4ED8AA4A, 0x5B9CCA4F, 0x682E6FF3,
    0x748F82EE, 0x78A5636F, 0x84C87814, 0x8CC70208, 0x90BEFFFA, 0xA4506CEB, 0xBEF9A3F7, 0xC67178F2,
)  # fmt: skip


@triton.jit
def _rotate(x, by: tl.constexpr):
    return (x >> by) | (x << (32 - by))


@triton.jit
def _swap(x):
    """The four bytes of a word in the other order."""
    return (x >> 24) | ((x >> 8) & 0xFF00) | ((x << 8) & 0xFF0000) | (x << 24)


@triton.jit
def _round(a, b, c, d, e, f, g, h, word, constant):
    first = h + (_rotate(e, 6) ^ _rotate(e, 11) ^ _rotate(e, 25)) + ((e & f) ^ ((e ^ 0xFFFFFFFF) & g)) + constant + word
    second = (_rotate(a, 2) ^ _rotate(a, 13) ^ _rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))
    return first + second, a, b, c, d + first, e, f, g


@triton.jit
def _next(w0, w1, w9, w14):
    """The word of the schedule sixteen places behind w0."""
    low = _rotate(w1, 7) ^ _rotate(w1, 18) ^ (w1 >> 3)
    high = _rotate(w14, 17) ^ _rotate(w14, 19) ^ (w14 >> 10)
    return w0 + low + w9 + high


@triton.jit
def _sixteen(a, b, c, d, e, f, g, h, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, k):
    a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w0, tl.load(k))
    a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w1, tl.load(k + 1))
    a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w2, tl.load(k + 2))
    a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w3, tl.load(k + 3))
    a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w4, tl.load(k + 4))
    a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w5, tl.load(k + 5))
    a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w6, tl.load(k + 6))
    a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w7, tl.load(k + 7))
    a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w8, tl.load(k + 8))
    a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w9, tl.load(k + 9))
    a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w10, tl.load(k + 10))
    a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w11, tl.load(k + 11))
    a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w12, tl.load(k + 12))
    a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w13, tl.load(k + 13))
    a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w14, tl.load(k + 14))
    a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w15, tl.load(k + 15))
    return a, b, c, d, e, f, g, h


@triton.jit
def _compress(
    a0, b0, c0, d0, e0, f0, g0, h0, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, k
):  # fmt: skip
    a, b, c, d, e, f, g, h = a0, b0, c0, d0, e0, f0, g0, h0
    for sixteen in range(4):
        a, b, c, d, e, f, g, h = _sixteen(
            a, b, c, d, e, f, g, h, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15,
            k + sixteen * 16,
        )  # fmt: skip
        w0 = _next(w0, w1, w9, w14)
        w1 = _next(w1, w2, w10, w15)
        w2 = _next(w2, w3, w11, w0)
        w3 = _next(w3, w4, w12, w1)
        w4 = _next(w4, w5, w13, w2)
        w5 = _next(w5, w6, w14, w3)
        w6 = _next(w6, w7, w15, w4)
        w7 = _next(w7, w8, w0, w5)
        w8 = _next(w8, w9, w1, w6)
        w9 = _next(w9, w10, w2, w7)
        w10 = _next(w10, w11, w3, w8)
        w11 = _next(w11, w12, w4, w9)
        w12 = _next(w12, w13, w5, w10)
        w13 = _next(w13, w14, w6, w11)
        w14 = _next(w14, w15, w7, w12)
        w15 = _next(w15, w0, w8, w13)
    return a0 + a, b0 + b, c0 + c, d0 + d, e0 + e, f0 + f, g0 + g, h0 + h


@triton.jit
def _word(words, at, mask):
    return _swap(tl.load(words + at, mask=mask, other=0).to(tl.uint32, bitcast=True))


@triton.jit
def leaf_hashes(words, out, tables, count, WORDS: tl.constexpr, LEAVES: tl.constexpr):
    """out[leaf, 8]: SHA-256 of WORDS words each, as words whose bytes are in the order of the hash.

    `tables`: the constants of the 64 rounds, then the 8 words at which a hash starts.
    """
    leaf = tl.program_id(0) * LEAVES + tl.arange(0, LEAVES)
    mask = leaf < count
    at = leaf.to(tl.int64) * WORDS
    k = tables.to(tl.pointer_type(tl.uint32), bitcast=True)
    zero = tl.zeros((LEAVES,), tl.uint32)
    a, b, c, d = zero + tl.load(k + 64), zero + tl.load(k + 65), zero + tl.load(k + 66), zero + tl.load(k + 67)
    e, f, g, h = zero + tl.load(k + 68), zero + tl.load(k + 69), zero + tl.load(k + 70), zero + tl.load(k + 71)
    for _ in range(WORDS // 16):
        a, b, c, d, e, f, g, h = _compress(
            a, b, c, d, e, f, g, h,
            _word(words, at, mask), _word(words, at + 1, mask), _word(words, at + 2, mask), _word(words, at + 3, mask),
            _word(words, at + 4, mask), _word(words, at + 5, mask), _word(words, at + 6, mask),
            _word(words, at + 7, mask), _word(words, at + 8, mask), _word(words, at + 9, mask),
            _word(words, at + 10, mask), _word(words, at + 11, mask), _word(words, at + 12, mask),
            _word(words, at + 13, mask), _word(words, at + 14, mask), _word(words, at + 15, mask), k,
        )  # fmt: skip
        at += 16
    # the block behind the bytes: a one, zeros, the number of bits
    one, bits = zero + 0x80000000, zero + WORDS * 32
    a, b, c, d, e, f, g, h = _compress(
        a, b, c, d, e, f, g, h,
        one, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, bits, k,
    )  # fmt: skip
    to = out + leaf.to(tl.int64) * 8
    tl.store(to, _swap(a).to(tl.int32, bitcast=True), mask=mask)
    tl.store(to + 1, _swap(b).to(tl.int32, bitcast=True), mask=mask)
    tl.store(to + 2, _swap(c).to(tl.int32, bitcast=True), mask=mask)
    tl.store(to + 3, _swap(d).to(tl.int32, bitcast=True), mask=mask)
    tl.store(to + 4, _swap(e).to(tl.int32, bitcast=True), mask=mask)
    tl.store(to + 5, _swap(f).to(tl.int32, bitcast=True), mask=mask)
    tl.store(to + 6, _swap(g).to(tl.int32, bitcast=True), mask=mask)
    tl.store(to + 7, _swap(h).to(tl.int32, bitcast=True), mask=mask)


def whole_leaves(x: Tensor) -> Tensor:
    """uint8 [leaves, 32]: the SHA-256 of each LEAF of these uint8 [leaves * LEAF], which lie at a multiple of 4."""
    count = x.numel() // LEAF
    out = torch.empty((count, 8), dtype=torch.int32, device=x.device)
    if count:
        with torch.cuda.device_of(x):
            leaf_hashes[(triton.cdiv(count, _LEAVES),)](
                x.view(torch.int32), out, _tables(x.device), count, WORDS=LEAF // 4, LEAVES=_LEAVES, num_warps=4
            )
    return out.view(torch.uint8)


@cache
def _tables(device: torch.device) -> Tensor:
    return torch.tensor([*_ROUNDS, *_START], dtype=torch.int64).to(torch.uint32).view(torch.int32).to(device)


KERNELS = (
    (
        "leaves", leaf_hashes, {"words": "*i32", "out": "*i32", "tables": "*i32", "count": "i32"},
        {"WORDS": LEAF // 4, "LEAVES": _LEAVES}, {"num_warps": 4},
    ),
)  # fmt: skip
