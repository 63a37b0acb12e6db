"""The attention boundary under a vLLM attention backend: K and V written to pages, queries over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from samebits.into_vllm.places import NotCovered
from samebits.ops.attention import paged_attention, write_kv


@dataclass
class Paged(AttentionMetadata):
    """Where the queries of one step sit and which pages hold their keys. Built once per step, for all layers."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor


class PagedBuilder(AttentionMetadataBuilder[Paged]):
    """Passes vLLM's own description of the batch on; there is no schedule to plan, so any batch can be captured."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Paged:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotCovered("attention: a batch that is not causal reached the causal boundary")
        return Paged(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )


class RoutedAttentionLayer(Attention):
    """vLLM's attention layer without the two custom-op dispatches, the output buffer and its copy.

    vLLM wraps the backend in opaque ops for its compiler; samebits runs eagerly, where they only cost time.
    There is no out-of-tree registration for this class, so the router changes the class of each instance.
    """

    calls: list[int]

    @classmethod
    def take_over(cls, layer: Attention) -> None:
        """Make a layer that vLLM built a routed one."""
        layer.__class__ = cls
        layer.calls = [0]  # type: ignore[assignment]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        described: Any = get_forward_context().attn_metadata
        if not described:  # vLLM's warm-up
            return torch.zeros_like(query)
        self.calls[0] += 1
        paged: Paged = described[self.layer_name]
        tokens = query.shape[0]
        head_size, kv_cache = self.head_size, self.kv_cache
        write_kv(
            key.view(tokens, self.num_kv_heads, head_size),
            value.view(tokens, self.num_kv_heads, head_size),
            kv_cache,
            paged.slot_mapping,
        )
        out = paged_attention(
            query.view(tokens, self.num_heads, head_size),
            kv_cache,
            paged.block_table,
            paged.seq_lens,
            paged.query_start_loc,
            self.impl.scale,
        )
        return out.view(tokens, self.num_heads * head_size)


class RoutedAttention(AttentionImpl[Paged]):
    """The covered settings of one attention layer; `RoutedAttentionLayer` computes."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **unknown: Any,
    ) -> None:
        refused = {
            "alibi": alibi_slopes,
            "sliding window": sliding_window,
            "logits soft cap": logits_soft_cap,
            "KV sharing": kv_sharing_target_layer_name,
            **unknown,
        }
        for feature, value in refused.items():
            if value:
                raise NotCovered(f"attention: {feature} ({value}) is not covered")
        if attn_type != AttentionType.DECODER:
            raise NotCovered(f"attention: type {attn_type!r} is not covered, only causal decoders")
        if kv_cache_dtype not in ("auto", "bfloat16"):
            raise NotCovered(f"attention: a KV cache of {kv_cache_dtype} is not covered, only bfloat16")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype

    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise RuntimeError("attention: vLLM's own attention layer reached the samebits backend")
