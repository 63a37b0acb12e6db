"""The whole decoder as one straight run of kernel calls, where every module of one worker is on the samebits route.

With small models, most of a decode step is Python between kernels: module dispatch, checks of shapes that never
change, small allocations. Here addresses and sizes are looked up once and intermediate values live in buffers that
are used again. The kernels are the same, called in the same order with the same inputs, so the bits are too;
`tests/into_vllm` compares both ways of running with the packed forward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from samebits import _cpu
from samebits.into_vllm.attention import Paged, RoutedAttentionLayer
from samebits.into_vllm.calls import Calls
from samebits.into_vllm.routing import RoutedModule
from samebits.ops.attention.scale import exponent_scale


class _Layer(NamedTuple):
    """Addresses of one decoder layer's weights; 0 stands for a weight that the model does not have."""

    input_norm: int
    q: int
    k: int
    v: int
    q_bias: int
    k_bias: int
    v_bias: int
    q_norm: int
    k_norm: int
    o: int
    o_bias: int
    mlp_norm: int
    gate_up: int
    gate_up_bias: int
    down: int
    down_bias: int


class StraightDecoder:
    """Takes the place of the inner model's `forward`: token ids and positions -> final normalised hidden states."""

    def __init__(self, model: Any, modules: list[RoutedModule]) -> None:
        inner = model.model
        first = inner.layers[0]
        attention: RoutedAttentionLayer = first.self_attn.attn
        self._embed: Any = inner.embed_tokens
        self.attention = [layer.self_attn.attn for layer in inner.layers]
        self.layers = [_layer(layer) for layer in inner.layers]
        self.final_norm = inner.norm.scale.data_ptr()
        self._calls: list[Calls] = [m.counts for m in modules if m.counts and m.name.startswith("model.")]
        self._rotary_calls = first.self_attn.rotary_emb.calls
        self._eps = first.input_layernorm.eps
        self._rotary = first.self_attn.rotary_emb
        self._heads, self._kv_heads, self._dim = attention.num_heads, attention.num_kv_heads, attention.head_size
        self._hidden, self._inner = self._embed.matrix.shape[1], first.mlp.down_proj.matrix.shape[1]
        self._o_segments, self._down_segments = first.self_attn.o_proj.segments, first.mlp.down_proj.segments
        self._scale = exponent_scale(attention.impl.scale)
        self._buffers: dict[str, Tensor] = {}
        self._rows = 0
        self.kernels: Any = _cpu  # a trace puts kernels that also record in its place

    @staticmethod
    def fits(model: Any, modules: list[RoutedModule]) -> bool:
        """True where every module is routed, one worker holds the model, and the layers are alike."""
        inner = model.model
        norms = {m.module.eps for m in modules if m.place.boundary == "rms_norm" and m.route == "R"}
        return all(m.route == "R" for m in modules) and inner.embed_tokens.tp_size == 1 and len(norms) == 1

    def install(self, model: Any) -> None:
        """Make vLLM's inner model run this."""
        model.model.forward = self.forward

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [tokens, hidden] bf16, ready for the LM head."""
        if input_ids is None or intermediate_tensors is not None or inputs_embeds is not None:
            raise RuntimeError("the decoder takes token ids only")
        tokens = input_ids.shape[0]
        described: Any = get_forward_context().attn_metadata
        if not described:  # vLLM's warm-up
            return torch.zeros(tokens, self._hidden, dtype=torch.bfloat16)
        for calls in self._calls:
            calls.computed += 1
        self._rotary_calls.computed += len(self.layers) - 1
        paged: Paged = described[self.attention[0].layer_name]
        _check(paged)
        out = torch.empty(tokens, self._hidden, dtype=torch.bfloat16)
        self._run(input_ids.long(), positions.long().contiguous(), paged, out)
        return out

    def _run(self, ids: Tensor, positions: Tensor, paged: Paged, out: Tensor) -> None:
        tokens, hidden, inner, dim = len(ids), self._hidden, self._inner, self._dim
        if tokens > self._rows:
            self._make_room(tokens)
        x, normed, stream, other, q, q2, k, k2, v, mixed, wide, narrow, scale = (
            buffer.data_ptr() for buffer in self._buffers.values()
        )
        heads, kv_heads, eps = self._heads, self._kv_heads, self._eps
        q_width, kv_width = heads * dim, kv_heads * dim
        where, cos, sin = positions.data_ptr(), self._rotary.cos.data_ptr(), self._rotary.sin.data_ptr()
        table_rows = self._rotary.cos.shape[0]
        kernels = self.kernels
        norm, linear, rotary = kernels.rms_norm_forward, kernels.linear_forward, kernels.rotary
        table, lengths, starts, slots = paged.block_table, paged.seq_lens, paged.query_start_loc, paged.slot_mapping
        batch = (table.data_ptr(), table.shape[1], table.stride(0), lengths.data_ptr(), starts.data_ptr(), len(lengths))
        weight = self._embed.matrix
        kernels.embedding_forward(ids.data_ptr(), weight.data_ptr(), stream, tokens, weight.shape[0], hidden, 0)
        for index, (w, attention) in enumerate(zip(self.layers, self.attention, strict=True)):
            if index == 0:
                norm(stream, hidden, 0, 0, w.input_norm, eps, normed, stream, scale, tokens, hidden)
            else:
                norm(x, hidden, stream, hidden, w.input_norm, eps, normed, other, scale, tokens, hidden)
                stream, other = other, stream
            linear(normed, hidden, w.q, hidden, w.q_bias, q, False, tokens, q_width, hidden, 1)
            linear(normed, hidden, w.k, hidden, w.k_bias, k, False, tokens, kv_width, hidden, 1)
            linear(normed, hidden, w.v, hidden, w.v_bias, v, False, tokens, kv_width, hidden, 1)
            if w.q_norm:
                norm(q, dim, 0, 0, w.q_norm, eps, q2, q, scale, tokens * heads, dim)
                norm(k, dim, 0, 0, w.k_norm, eps, k2, k, scale, tokens * kv_heads, dim)
                rotary(q2, q_width, dim, where, cos, sin, q, tokens, heads, dim, table_rows, False)
                rotary(k2, kv_width, dim, where, cos, sin, k, tokens, kv_heads, dim, table_rows, False)
                turned_q, turned_k = q, k
            else:
                rotary(q, q_width, dim, where, cos, sin, q2, tokens, heads, dim, table_rows, False)
                rotary(k, kv_width, dim, where, cos, sin, k2, tokens, kv_heads, dim, table_rows, False)
                turned_q, turned_k = q2, k2
            cache = attention.kv_cache
            blocks, _, page, _ = cache.shape
            page_stride, head_stride, slot_stride, _ = cache.stride()
            pages = cache.data_ptr()
            kernels.write_kv(
                turned_k, kv_width, dim, v, kv_width, dim, pages, page_stride, head_stride, slot_stride, blocks, page,
                slots.data_ptr(), tokens, kv_heads, dim,
            )  # fmt: skip
            kernels.attention_paged(
                turned_q, q_width, dim, pages, blocks, page, page_stride, head_stride, slot_stride, *batch, tokens,
                heads, kv_heads, dim, self._scale, mixed,
            )  # fmt: skip
            linear(mixed, q_width, w.o, q_width, w.o_bias, x, False, tokens, hidden, q_width, self._o_segments)
            norm(x, hidden, stream, hidden, w.mlp_norm, eps, normed, other, scale, tokens, hidden)
            stream, other = other, stream
            linear(normed, hidden, w.gate_up, hidden, w.gate_up_bias, wide, False, tokens, 2 * inner, hidden, 1)
            kernels.swiglu_forward(wide, 2 * inner, narrow, tokens, inner)
            linear(narrow, inner, w.down, inner, w.down_bias, x, False, tokens, hidden, inner, self._down_segments)
        norm(x, hidden, stream, hidden, self.final_norm, eps, out.data_ptr(), other, scale, tokens, hidden)

    def _make_room(self, rows: int) -> None:
        q_width, kv_width = self._heads * self._dim, self._kv_heads * self._dim
        widths = {
            "x": self._hidden,
            "normed": self._hidden,
            "stream": self._hidden,
            "other": self._hidden,
            "q": q_width,
            "q2": q_width,
            "k": kv_width,
            "k2": kv_width,
            "v": kv_width,
            "mixed": q_width,
            "wide": 2 * self._inner,
            "narrow": self._inner,
        }
        self._buffers = {name: torch.empty(rows, width, dtype=torch.bfloat16) for name, width in widths.items()}
        self._buffers["scale"] = torch.empty(rows * self._heads, dtype=torch.float32)
        self._rows = rows


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = attention.qkv_proj
    q_rows, kv_rows = qkv.num_heads * qkv.head_size, qkv.num_kv_heads * qkv.head_size
    ends = (q_rows, q_rows + kv_rows)
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    addresses = (
        layer.input_layernorm.scale.data_ptr(),
        *(_at(qkv.matrix, row) for row in (0, *ends)),
        *(_at(qkv.offset, row) for row in (0, *ends)),
        *(0 if norm is None else norm.scale.data_ptr() for norm in norms),
        _at(attention.o_proj.matrix, 0),
        _at(attention.o_proj.offset, 0),
        layer.post_attention_layernorm.scale.data_ptr(),
        _at(mlp.gate_up_proj.matrix, 0),
        _at(mlp.gate_up_proj.offset, 0),
        _at(mlp.down_proj.matrix, 0),
        _at(mlp.down_proj.offset, 0),
    )
    return _Layer._make(addresses)


def _check(paged: Paged) -> None:
    """The kernels read these by address."""
    wanted = (
        ("block_table", paged.block_table, torch.int32),
        ("seq_lens", paged.seq_lens, torch.int32),
        ("query_start_loc", paged.query_start_loc, torch.int32),
        ("slot_mapping", paged.slot_mapping, torch.int64),
    )
    for name, tensor, dtype in wanted:
        if tensor.dtype != dtype or tensor.stride(-1) != 1:
            raise RuntimeError(f"attention: vLLM's {name} is {tensor.dtype} with strides {tensor.stride()}")


def _at(tensor: Tensor | None, row: int) -> int:
    return 0 if tensor is None else tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size()
