"""Megatron-Core modules whose arithmetic is the contract's.

They keep Megatron's parameter names, shapes and sharding attributes, so that weights, optimizer and checkpoints
see no difference. Linear layers are subclasses: only `forward` is ours.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from samebits.collectives import gather_rows, tree_all_reduce, tree_reduce_scatter
from samebits.into_megatron.column_parallel import column_parallel
from samebits.into_megatron.layout import Packing
from samebits.into_megatron.order import (
    GradientOrder,
    ordered_attention,
    ordered_columns,
    ordered_norm,
    ordered_partial,
)
from samebits.into_megatron.rows import take_rows
from samebits.into_megatron.shared_tokens import group_columns, own_heads
from samebits.ops.attention import attention
from samebits.ops.linear import linear, linear_partial
from samebits.ops.rms_norm import rms_norm
from samebits.ops.rotary import rotary, rotary_table
from samebits.ops.swiglu import swiglu


class StrictLayer(TransformerLayer):
    """Megatron's layer. Before it runs, also when it is recomputed, its micro-batch's packing is put where gradient
    functions look for it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.config.gradient_order is not None:
            self.config.gradient_order.packing = kwargs["packed_seq_params"]
        return super().forward(*args, **kwargs)


class StrictNorm(torch.nn.Module):
    """RMSNorm over the last axis."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums the gradients of such weights over tensor-parallel ranks, each of which saw some of the rows.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.order: GradientOrder | None = config.gradient_order
        self.split_rows = config.sequence_parallel
        self.sharers = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.order is None:
            return rms_norm(x, self.weight, self.eps)
        return ordered_norm(x, self.weight, self.eps, self.order, self.split_rows, self.sharers)


class StrictHeadNorm(StrictNorm):
    """The QK-norm, over head_dim. Tensor-parallel ranks see all rows, of their own heads."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__(config, hidden_size, eps)
        ranks = config.tensor_model_parallel_size
        self.split_rows = False
        self.sharers = max(1, ranks // config.num_query_groups) if ranks > 1 else 0


class StrictColumnParallelLinear(ColumnParallelLinear):
    """A linear layer split by output columns: every rank has all of K, so S = 1 and no sum crosses ranks."""

    halves = 1

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        bias = None if self.skip_bias_add else self.bias
        weight = self.weight if weight is None else weight
        order = self.config.gradient_order
        if order is None:
            output = column_parallel(input_, weight, bias, self.tp_group, self.sequence_parallel)
        else:
            output = ordered_columns(input_, weight, bias, order, self.sequence_parallel, self.halves)
        return output, self.bias if self.skip_bias_add else None


class StrictGateUpLinear(StrictColumnParallelLinear):
    """The columns [gate | up], of which every rank holds an equal part of each."""

    halves = 2


class StrictRowParallelLinear(RowParallelLinear):
    """A linear layer split along K into `segments` runs, of which each rank holds an equal, consecutive share."""

    def __init__(self, *args: Any, segments: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.bias is not None:
            raise ValueError("linear: a bias on a row-parallel layer is not served")
        self.segments = segments

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        ranks, order = self.tp_group.size(), self.config.gradient_order
        if order is not None:
            partial = ordered_partial(input_, self.weight, self.segments // ranks, order)
        elif ranks == 1:
            return linear(input_, self.weight, segments=self.segments), None
        else:
            partial = linear_partial(input_, self.weight, segments=self.segments // ranks)
        leave = tree_reduce_scatter if self.sequence_parallel else tree_all_reduce
        return leave(partial, self.tp_group).to(input_.dtype), None


class StrictSwiGLU(MegatronModule):
    """SwiGLU over [gate | up]; Megatron's local fc1 keeps gate and up in this order on every rank."""

    def forward(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)


class StrictCoreAttention(MegatronModule):
    """Causal attention over packed samples; under context parallelism, own queries over gathered keys and values."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.cp_group = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """[T, heads, head_dim] from query, key and value [T, heads or groups, head_dim]."""
        if packing.key_order is None:
            return attention(query, key, value, packing.keys, self.scale)
        if self.config.gradient_order is not None:
            return ordered_attention(query, key, value, self.scale, packing, self.config.gradient_order)
        key, value = self.all_keys(key, value, packing)
        return attention(
            query,
            key,
            value,
            packing.keys,
            self.scale,
            q_positions=packing.positions,
            cu_seqlens_q=packing.queries,
        )

    def all_keys(self, key: Tensor, value: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """Keys and values of all context-parallel ranks, in order of sample and position."""
        if packing.key_order is None:
            return key, value
        both = gather_rows(torch.cat([key, value], dim=1), self.cp_group)
        key, value = take_rows(both, packing.key_order).chunk(2, dim=1)
        return key.contiguous(), value.contiguous()


class StrictSelfAttention(SelfAttention):
    """Self-attention on a packed micro-batch: QKV, QK-norm, rotary at explicit positions, attention, projection."""

    def __init__(self, *args: Any, rope_base: float, max_positions: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Ranks that outnumber the key/value heads share them: each computes its own queries over its group's keys.
        self.sharers = max(1, self.world_size // self.config.num_query_groups)
        self._turns = (self.config.kv_channels, rope_base, max_positions)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Packing,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        packing = packed_seq_params
        query, key, value = self._split(self.linear_qkv(hidden_states)[0])
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        cos, sin = self.table(query.device)
        query = rotary(query, packing.positions, cos, sin)
        key = rotary(key, packing.positions, cos, sin)
        out = self.core_attention(query, key, value, packing)
        if self.sharers > 1 and self.config.gradient_order is not None:
            out = own_heads(out, self.tp_group, self.sharers)
        return self.linear_proj(out.reshape(out.shape[0], 1, -1))

    def table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(cos, sin) of every position, fp32 on `device`; one table for all layers."""
        return _table(*self._turns, device)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, heads, head_dim] query, key and value out of Megatron's interleaving by key/value group."""
        if self.sharers > 1:
            qkv = self._group_columns(qkv)
        groups = self.num_query_groups_per_partition
        per_group = self.num_attention_heads_per_partition // groups
        head_dim = self.hidden_size_per_attention_head
        grouped = qkv.reshape(qkv.shape[0], groups, per_group + 2, head_dim)
        query, key, value = grouped.split([per_group, 1, 1], dim=2)
        if self.sharers > 1 and self.config.gradient_order is None:
            query = query.chunk(self.sharers, dim=2)[self.tp_group.rank() % self.sharers]
        return (
            query.reshape(qkv.shape[0], -1, head_dim),
            key.reshape(-1, groups, head_dim),
            value.reshape(-1, groups, head_dim),
        )

    def _group_columns(self, qkv: Tensor) -> Tensor:
        """[T, columns of this rank's key/value group], of which the group's ranks hold equal parts.

        With gradients in order the group's ranks compute the same from here to their own heads' output.
        """
        if self.config.gradient_order is not None:
            return group_columns(qkv.reshape(qkv.shape[0], -1), self.tp_group, self.sharers)
        columns = gather_rows(qkv.reshape(qkv.shape[0], -1).t(), self.tp_group).t().contiguous()
        return columns.chunk(self.config.num_query_groups, dim=1)[self.tp_group.rank() // self.sharers]


@lru_cache(maxsize=8)
def _table(head_dim: int, base: float, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    cos, sin = rotary_table(head_dim, base, positions)
    return cos.to(device), sin.to(device)
