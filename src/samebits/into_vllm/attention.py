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

from samebits.into_vllm.calls import Calls
from samebits.into_vllm.pieces import outside_of_pieces
from samebits.into_vllm.places import NotCovered
from samebits.ops.attention import HeadConstants, paged_attention, prepare_heads, write_kv


@dataclass
class Paged(AttentionMetadata):
    """Where the queries of one step sit and which pages hold their keys. Built once per step, for all layers."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_query_len: int  # of a batch that is captured: the most that one of its size may have


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
            max_query_len=common.max_query_len,
        )


class RoutedAttentionLayer(Attention):
    """vLLM's attention layer without the two custom-op dispatches.

    vLLM wraps the backend in opaque ops for its compiler; samebits runs without it, where they only cost time.
    There is no out-of-tree registration for this class, so the router changes the class of each instance.
    """

    calls: Calls

    @classmethod
    def take_over(cls, layer: Attention) -> None:
        """Make a layer that vLLM built a routed one."""
        layer.__class__ = cls
        layer.calls = Calls()  # type: ignore[assignment]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        _write_and_attend(self, query, key, value, out)
        return out

    def batch(self) -> Paged | None:
        """The batch that is computed; None in vLLM's warm-up, where there is no cache yet."""
        described: Any = get_forward_context().attn_metadata
        if not described:
            return None
        self.calls.note()
        paged: Paged = described[self.layer_name]
        return paged

    def attend(self, q: Tensor, paged: Paged, out: Tensor) -> None:
        """Fills `out` [tokens, heads * head_dim]; the keys and values of q [tokens, heads, head_dim] are written."""
        paged_attention(
            q,
            self.kv_cache,
            paged.block_table,
            paged.seq_lens,
            paged.query_start_loc,
            self.impl.scale,
            max_query_len=paged.max_query_len,
            out=out.view(q.shape),
        )


@outside_of_pieces
def _write_and_attend(layer: RoutedAttentionLayer, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    paged = layer.batch()
    if paged is None:
        out.zero_()
        return
    tokens, size = query.shape[0], layer.head_size
    k, v = (x.view(tokens, layer.num_kv_heads, size) for x in (key, value))
    write_kv(k, v, layer.kv_cache, paged.slot_mapping)
    layer.attend(query.view(tokens, layer.num_heads, size), paged, out)


class FusedHeads:
    """Takes the place of a vLLM attention module's `forward`: between its two linear maps, one launch and attention.

    The bits are those of the module's own way through norms, rotation and attention layer, which a trace watches.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._layer: RoutedAttentionLayer = module.attn
        self._norms = _norms_of(module)
        norms = (*(norm.scale for norm in self._norms), self._norms[0].eps) if self._norms else None
        rotary = module.rotary_emb
        self._constants = HeadConstants((rotary.cos, rotary.sin), norms)

    @staticmethod
    def fits(module: Any) -> bool:
        """True where nothing but norms, rotation and the layer stands between the two maps, and all are routed."""
        return (
            type(module).__name__ in ("Qwen3Attention", "Qwen2Attention", "LlamaAttention")
            and not getattr(module, "do_llama_4_scaling", False)
            and isinstance(module.attn, RoutedAttentionLayer)
            and len({norm.eps for norm in _norms_of(module)}) <= 1
        )

    def install(self) -> None:
        self._module.forward = self.forward

    def remove(self) -> None:
        del self._module.forward

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv, _ = self._module.qkv_proj(hidden_states)
        out = qkv.new_empty(len(qkv), self._layer.num_heads * self._layer.head_size)
        _prepare_and_attend(self, qkv, positions, out)
        mixed: Tensor = self._module.o_proj(out)[0]
        return mixed

    def attend(self, qkv: Tensor, positions: Tensor, out: Tensor) -> None:
        """Fills `out` [tokens, heads * head_dim] from the rows of the QKV product."""
        paged = self._layer.batch()
        if paged is None:
            out.zero_()
            return
        for part in (*self._norms, self._module.rotary_emb):
            part.calls.note()
        q = prepare_heads(qkv, positions, self._constants, self._layer.kv_cache, paged.slot_mapping)
        self._layer.attend(q, paged, out)


def _norms_of(module: Any) -> list[Any]:
    """The QK-norms of an attention module, where its model has them."""
    return [norm for norm in (getattr(module, name, None) for name in ("q_norm", "k_norm")) if norm is not None]


@outside_of_pieces
def _prepare_and_attend(heads: FusedHeads, qkv: Tensor, positions: Tensor, out: Tensor) -> None:
    heads.attend(qkv, positions, out)


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
