"""vLLM's view of the attention boundary where the engine runs on a CPU."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionType, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from samebits.into_vllm.attention import PagedBuilder, RoutedAttention


class RoutedAttentionBackend(CPUAttentionBackend):
    """Takes the place of vLLM's CPU backend, whose name it must keep."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16"]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return RoutedAttention

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return PagedBuilder
