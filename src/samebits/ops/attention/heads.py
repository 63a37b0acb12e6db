"""From the rows of a QKV product to queries for attention over pages, keys and values written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.ops.rms_norm import rms_norm
from samebits.ops.rotary import rotary


@dataclass(frozen=True)
class HeadConstants:
    """What a layer does to its heads: `table` is cos and sin of `rotary_table`; `norms` are weights [D] of queries and
    keys and their eps, where the model has QK-norm."""

    table: tuple[Tensor, Tensor]
    norms: tuple[Tensor, Tensor, float] | None = None


def prepare_heads(
    qkv: Tensor, positions: Tensor, constants: HeadConstants, kv_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Queries [T, Hq, D] bf16; keys and values go to the slots of kv_cache [blocks, Hkv, block_size, 2 D].

    qkv [T, (Hq + 2 Hkv) D] bf16, heads side by side; positions and slot_mapping int64 [T]. The bits are those of
    `rms_norm`, `rotary` and `write_kv` one after the other; on a GPU all of it is one launch. No gradients.
    Raises ValueError on other dtypes or shapes.
    """
    kv_heads, dim = kv_cache.shape[1], kv_cache.shape[3] // 2
    heads = query_heads(qkv, kv_cache)
    if qkv.dtype != torch.bfloat16 or qkv.ndim != 2 or heads < 1 or qkv.shape[1] != (heads + 2 * kv_heads) * dim:
        raise ValueError(
            f"prepare_heads: qkv must be bfloat16 [T, (Hq + 2 * {kv_heads}) * {dim}] for this cache, "
            f"got {qkv.dtype} {list(qkv.shape)}"
        )
    if positions.shape != qkv.shape[:1]:
        raise ValueError(f"prepare_heads: positions must be [{qkv.shape[0]}], got {list(positions.shape)}")
    if qkv.is_cuda:
        from samebits.ops.attention import triton_heads

        if triton_heads.serves(dim):
            return triton_heads.prepare(qkv, positions.long(), constants, kv_cache, slot_mapping)
    return _one_by_one(qkv, positions, constants, kv_cache, slot_mapping)


def query_heads(qkv: Tensor, kv_cache: Tensor) -> int:
    """The heads of a row that are no key's and no value's."""
    return qkv.shape[-1] // (kv_cache.shape[3] // 2) - 2 * kv_cache.shape[1]


def _one_by_one(
    qkv: Tensor, positions: Tensor, constants: HeadConstants, kv_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    from samebits.ops.attention import write_kv

    kv_heads, dim = kv_cache.shape[1], kv_cache.shape[3] // 2
    q, k, v = qkv.view(len(qkv), -1, dim).split([query_heads(qkv, kv_cache), kv_heads, kv_heads], dim=1)
    if constants.norms is not None:
        q_weight, k_weight, eps = constants.norms
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    q, k = (rotary(part, positions, *constants.table) for part in (q, k))
    write_kv(k, v, kv_cache, slot_mapping)
    return q
