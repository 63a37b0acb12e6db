"""vLLM's layers with their arithmetic replaced: same parameters, same weight loading, samebits ops inside.

vLLM builds these instead of its own classes because they are registered out of tree. A layer that the plan
leaves native is turned back into vLLM's class (`release`), so that the native side runs untouched code.
A routed layer keeps its plain weights: vLLM would pack them and run the packed copy.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from samebits.collectives import attach, check, gather_states, tree_all_reduce_bf16
from samebits.into_vllm.calls import Calls
from samebits.into_vllm.config import Device
from samebits.into_vllm.places import NotCovered
from samebits.ops.embedding import embedding
from samebits.ops.linear import linear, linear_partial, matmul_f32
from samebits.ops.rms_norm import add_rms_norm, rms_norm
from samebits.ops.rotary import rotary, rotary_table
from samebits.ops.swiglu import swiglu


class Routed:
    """What every routed layer has: vLLM's own class, a check of its settings, tensors at hand, a count of calls."""

    native: ClassVar[type[nn.Module]]
    newer: ClassVar[frozenset[str]] = frozenset()  # settings that older releases lack: they do what is covered
    calls: Calls

    def take(self, name: str, segments: int) -> None:
        """Accept this layer for the samebits route. Raises NotCovered naming a setting that no boundary has."""
        self.calls = Calls()
        for setting, wanted in self.wants().items():
            if setting in self.newer and not hasattr(self, setting):
                continue
            found = getattr(self, setting)
            if found != wanted:
                raise NotCovered(f"module {name!r}: {setting} is {found!r}, the boundary covers {wanted!r} only")

    def wants(self) -> dict[str, Any]:
        """Attribute -> the only value that the boundary covers."""
        return {}

    def ready(self) -> None:
        """Called once the weights are loaded: keep tensors as plain attributes, which modules find faster."""

    def release(self) -> None:
        """Turn this layer back into vLLM's own class."""
        self.__class__ = self.native  # type: ignore[assignment]


class KeptLinear(UnquantizedLinearMethod):
    """Linear weights stay as they were loaded."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass


class KeptEmbedding(UnquantizedEmbeddingMethod):
    """Embedding weights stay as they were loaded."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass


def _keep_weights(layer: Any, name: str, plain: type, kept: type) -> None:
    if type(layer.quant_method) is not plain:
        raise NotCovered(f"module {name!r}: {type(layer.quant_method).__name__} weights; only plain bf16 is covered")
    layer.quant_method = kept()


class RoutedRMSNorm(Routed, RMSNorm):
    native = RMSNorm
    scale: Tensor

    def wants(self) -> dict[str, Any]:
        return {"variance_size_override": None, "has_weight": True}

    def ready(self) -> None:
        self.scale = self.weight.data
        self.eps = float(self.variance_epsilon)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        self.calls.note()
        if residual is None:
            return rms_norm(x, self.scale, self.eps)
        return add_rms_norm(x, residual, self.scale, self.eps)


class _RoutedColumns(Routed):
    """Output columns split over ranks: every rank computes whole dot products, so S = 1."""

    weight: Tensor
    bias: Any
    matrix: Tensor

    def wants(self) -> dict[str, Any]:
        return {"gather_output": False, "skip_bias_add": False, "return_bias": True}

    def take(self, name: str, segments: int) -> None:
        super().take(name, segments)
        _keep_weights(self, name, UnquantizedLinearMethod, KeptLinear)

    def ready(self) -> None:
        self.matrix = self.weight.data
        self.offset = None if self.bias is None else self.bias.data

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        self.calls.note()
        return linear(input_, self.matrix, self.offset), None


class RoutedQKV(_RoutedColumns, QKVParallelLinear):
    native = QKVParallelLinear


class RoutedMergedColumns(_RoutedColumns, MergedColumnParallelLinear):
    native = MergedColumnParallelLinear


class RoutedRows(Routed, RowParallelLinear):
    """K split over ranks: this rank's run of K segments is a subtree, the ranks finish the same tree."""

    native = RowParallelLinear
    weight: Tensor
    matrix: Tensor

    def wants(self) -> dict[str, Any]:
        return {"input_is_parallel": True, "reduce_results": True, "skip_bias_add": False, "return_bias": True}

    def take(self, name: str, segments: int) -> None:
        super().take(name, segments)
        _keep_weights(self, name, UnquantizedLinearMethod, KeptLinear)
        if segments % self.tp_size or self.input_size % segments:
            raise NotCovered(
                f"module {name!r}: K = {self.input_size} on {self.tp_size} ranks "
                f"does not split into {segments} equal segments"
            )
        self.segments = segments // self.tp_size

    def ready(self) -> None:
        self.matrix = self.weight.data
        self.offset = None if self.bias is None else self.bias.data

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        self.calls.note()
        if self.tp_size == 1:
            return linear(input_, self.matrix, self.offset, segments=self.segments), None
        partial = linear_partial(input_, self.matrix, segments=self.segments)
        return tree_all_reduce_bf16(partial, get_tp_group().cpu_group, self.offset), None


class RoutedSiluAndMul(Routed, SiluAndMul):
    native = SiluAndMul

    def forward(self, x: Tensor) -> Tensor:
        self.calls.note()
        return swiglu(x)


class RoutedRotary(Routed, RotaryEmbedding):
    native = RotaryEmbedding
    cos: Tensor
    sin: Tensor

    def take(self, name: str, segments: int) -> None:
        super().take(name, segments)
        if type(self) is not RoutedRotary:
            raise NotCovered(f"module {name!r}: rope scaling ({type(self).__name__}) is not covered")
        if self.rotary_dim != self.head_size:
            raise NotCovered(
                f"module {name!r}: rotates {self.rotary_dim} of {self.head_size} dimensions; all is covered"
            )

    def wants(self) -> dict[str, Any]:
        return {"is_neox_style": True}

    def ready(self) -> None:
        table = _table(self.head_size, float(self.base), self.max_position_embeddings)
        self.cos, self.sin = (part.to(self.cos_sin_cache.device) for part in table)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        self.calls.note()
        return self._rotate(query, positions), None if key is None else self._rotate(key, positions)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        heads = x.view(x.shape[0], -1, self.head_size)
        return rotary(heads, positions, self.cos, self.sin).view(x.shape)


@lru_cache(maxsize=8)
def _table(head_size: int, base: float, max_positions: int) -> tuple[Tensor, Tensor]:
    return rotary_table(head_size, base, max_positions)


class RoutedEmbedding(Routed, VocabParallelEmbedding):
    """Rows are copied; under tensor parallelism the owner's row is selected, never summed."""

    native = VocabParallelEmbedding
    newer = frozenset({"reduce_results", "parallel_group"})
    weight: Tensor
    matrix: Tensor

    def wants(self) -> dict[str, Any]:
        return {"num_added_embeddings": 0, "reduce_results": True, "parallel_group": None}

    def take(self, name: str, segments: int) -> None:
        super().take(name, segments)
        _keep_weights(self, name, UnquantizedEmbeddingMethod, KeptEmbedding)

    def ready(self) -> None:
        self.matrix = self.weight.data
        self.start = self.shard_indices.padded_org_vocab_start_index

    def forward(self, input_: Tensor) -> Tensor:
        self.calls.note()
        ids = input_.long()
        own = embedding(ids, self.matrix, start=self.start)
        if self.tp_size == 1:
            return own
        stacked = torch.stack(gather_ranks(own))
        return stacked[ids // self.num_embeddings_per_partition, torch.arange(ids.shape[0], device=ids.device)]


class RoutedHead(Routed, ParallelLMHead):
    """Holds the LM head's weight; `RoutedLogits` computes with it."""

    native = ParallelLMHead
    weight: Tensor

    def wants(self) -> dict[str, Any]:
        return {"num_added_embeddings": 0}

    def take(self, name: str, segments: int) -> None:
        super().take(name, segments)
        _keep_weights(self, name, UnquantizedEmbeddingMethod, KeptEmbedding)


class RoutedLogits(Routed, LogitsProcessor):
    """Logits stay fp32 accumulators; ranks hold whole columns, so gathering them is a move."""

    native = LogitsProcessor

    def wants(self) -> dict[str, Any]:
        return {"scale": 1.0, "soft_cap": None, "logits_as_input": False}

    def forward(
        self,
        lm_head: Any,
        hidden_states: Tensor,
        embedding_bias: Tensor | None = None,
        skip_gather: bool = False,
    ) -> Tensor:
        self.calls.note()
        lm_head.calls.note()
        if lm_head.tp_size == 1:
            return matmul_f32(hidden_states, lm_head.weight[: self.org_vocab_size], embedding_bias)
        logits = matmul_f32(hidden_states, lm_head.weight, embedding_bias)
        if skip_gather:
            return logits
        return torch.cat(gather_ranks(logits), dim=-1)[..., : self.org_vocab_size].contiguous()


def share_memory_among_workers(device: Device) -> None:
    """Let the tensor-parallel workers exchange what they must in memory of this host, or of its GPUs.

    On a CPU, vLLM's own collectives spin until everybody came, which takes the cores from workers that outnumber them.
    On GPUs, its all-reduce adds rounded values, in an order that depends on their number.
    """
    attach(get_tp_group().cpu_group, "shared_memory" if device == "cpu" else "peer_memory")


def check_workers() -> None:
    """Raise what the exchange with another worker met on the device. Free where there is one worker."""
    group = get_tp_group().cpu_group
    if group.size() > 1:
        check(group)


def gather_ranks(own: Tensor) -> list[Tensor]:
    """Every tensor-parallel rank's tensor, in rank order."""
    return list(gather_states(own, get_tp_group().cpu_group).unbind(0))


ROUTED_LAYERS: tuple[type[Routed], ...] = (
    RoutedRMSNorm,
    RoutedQKV,
    RoutedMergedColumns,
    RoutedRows,
    RoutedSiluAndMul,
    RoutedRotary,
    RoutedEmbedding,
    RoutedHead,
    RoutedLogits,
)
