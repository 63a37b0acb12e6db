"""vLLM's view of the attention boundary where the engine runs on a GPU: the backend named CUSTOM."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from samebits.into_vllm.attention import PagedBuilder, RoutedAttention


class RoutedGPUAttentionBackend(AttentionBackend):
    """Pages of [kv head, slot, K then V], as the boundary's kernels read them."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return RoutedAttention

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return PagedBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def use_cascade_attention(*_: Any, **__: Any) -> bool:
        return False
