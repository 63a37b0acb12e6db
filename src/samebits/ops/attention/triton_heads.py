"""What stands between the QKV product and attention over pages, in one launch: QK-norm, rotation, keys and values."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.arithmetic.triton import count_launch, fold_halves_of, round_bf16_of
from samebits.backends.device_counters import slot
from samebits.backends.launcher import cdiv, launcher
from samebits.ops.attention.heads import HeadConstants, query_heads
from samebits.ops.rms_norm.contract import LANES

ROWS = 8  # heads of one token that a program takes


def serves(head_dim: int) -> bool:
    """Powers of two up to the lanes of a norm: there its first sum is that of the two halves that are rotated."""
    return 2 <= head_dim <= LANES and head_dim & (head_dim - 1) == 0


@triton.jit
def prepare_heads(
    qkv, positions, cos, sin, q_weight, k_weight, q_out, cache, slots, rotary_counter, norm_counter,
    kept, qkv_token, page_stride, head_stride, slot_stride, eps,
    Q: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program: ROWS of the Q + 2 KV heads of one token. Tokens from `kept` on have no slot."""
    count_launch(rotary_counter)
    if NORM:
        count_launch(norm_counter)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    there = (head < Q + 2 * KV) & (d < HALF)
    source = qkv + token * qkv_token + head * (2 * HALF) + d
    raw1 = tl.load(source, mask=there, other=0.0)
    raw2 = tl.load(source + HALF, mask=there, other=0.0)
    x1 = raw1.to(tl.float32)
    x2 = raw2.to(tl.float32)
    if NORM:
        mean = tl.div_rn(fold_halves_of(x1 * x1 + x2 * x2, ROWS, HALF), HALF * 2.0)
        factor = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]
        w1 = tl.where(head < Q, tl.load(q_weight + d), tl.load(k_weight + d))
        w2 = tl.where(head < Q, tl.load(q_weight + HALF + d), tl.load(k_weight + HALF + d))
        x1 = round_bf16_of((x1 * factor) * w1.to(tl.float32)).to(tl.float32)
        x2 = round_bf16_of((x2 * factor) * w2.to(tl.float32)).to(tl.float32)
    position = tl.load(positions + token)
    c = tl.load(cos + position * HALF + d)
    s = tl.load(sin + position * HALF + d)
    value = head >= Q + KV
    y1 = tl.where(value, raw1, round_bf16_of(x1 * c - x2 * s))
    y2 = tl.where(value, raw2, round_bf16_of(x2 * c + x1 * s))
    query = there & (head < Q)
    to = q_out + (token * Q + head) * (2 * HALF) + d
    tl.store(to, y1, mask=query)
    tl.store(to + HALF, y2, mask=query)
    place = tl.load(slots + token, mask=token < kept, other=-1)
    held = there & (head >= Q) & (place >= 0)
    of_kv = (head - Q) % KV
    page = cache + (place // SIZE) * page_stride + (place % SIZE) * slot_stride + of_kv * head_stride + d
    page += tl.where(value, 2 * HALF, 0)
    tl.store(page, y1, mask=held)
    tl.store(page + HALF, y2, mask=held)


def prepare(qkv: Tensor, positions: Tensor, constants: HeadConstants, kv_cache: Tensor, slot_mapping: Tensor) -> Tensor:
    """Queries [T, Q, D]; fills the slots of kv_cache."""
    tokens, heads, dim = qkv.shape[0], query_heads(qkv, kv_cache), kv_cache.shape[3] // 2
    kv_heads, size = kv_cache.shape[1:3]
    q = torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device=qkv.device)
    if tokens == 0:
        return q
    q_weight, k_weight, eps = constants.norms or (None, None, 0.0)
    counter = slot("rotary.heads", q.device)
    launcher(prepare_heads)[(tokens, cdiv(heads + 2 * kv_heads, ROWS))](
        qkv, positions, *constants.table, q_weight, k_weight, q, kv_cache, slot_mapping, counter,
        slot("rms_norm.heads", q.device) if constants.norms else counter,
        slot_mapping.shape[0], qkv.stride(0), *kv_cache.stride()[:3], eps,
        Q=heads, KV=kv_heads, HALF=dim // 2, SIZE=size, NORM=constants.norms is not None, ROWS=ROWS, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return q
