"""Which products of a worker the vendor's library may compute: those that are faster there and certified here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig

from samebits import env
from samebits.into_vllm.layers import Routed, RoutedRows
from samebits.ops.linear import vendor
from samebits.ops.linear.launch import vendor_plan


def certify_products(modules: Iterable[Any], config: VllmConfig) -> None:
    """Tries the vendor's product for every linear map without bias at the row counts that come back often: those of
    captured batches and of a full step. Products without a certificate stay with the kernels of samebits."""
    rows = [*(config.compilation_config.cudagraph_capture_sizes or ()), config.scheduler_config.max_num_batched_tokens]
    weights = [one.matrix for one in modules if _is_plain(one)]
    chosen = {name: env.read(name) for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")}
    workspace = "".join(f", {name}={value}" for name, value in chosen.items() if value)
    for m, n, k in vendor_plan(rows, [(w.shape[0], w.shape[1]) for w in weights]):
        vendor.certify(m, n, k, weights[0].device, workspace)
    torch.cuda.empty_cache()


def _is_plain(module: Any) -> bool:
    """A linear map whose bf16 result is one whole product: no bias, no segments, no other ranks."""
    if not isinstance(module, Routed) or getattr(module, "offset", None) is not None:
        return False
    if isinstance(module, RoutedRows):
        return module.tp_size == 1 and module.segments == 1
    return module.native.__name__ in ("QKVParallelLinear", "MergedColumnParallelLinear")
