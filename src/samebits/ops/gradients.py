"""Where the gradient of a weight goes.

Weight gradients are sums over tokens. A trainer that keeps an fp32 `main_grad` beside each parameter
(Megatron's gradient buffer) gets them added there, *continuing the chain of fma over tokens*: cutting a
batch into micro-batches then changes no bit. Without one, autograd receives the sum rounded once.
"""

from __future__ import annotations

from functools import lru_cache

import torch


def weight_gradient_buffer(weight: torch.Tensor) -> torch.Tensor:
    """The contiguous fp32 tensor that a backward kernel continues: `weight.main_grad`, or zeros."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    if main_grad.dtype != torch.float32 or not main_grad.is_contiguous() or main_grad.shape != weight.shape:
        raise ValueError(
            f"main_grad must be contiguous float32 {list(weight.shape)}, "
            f"got {main_grad.dtype} {list(main_grad.shape)} with strides {main_grad.stride()}"
        )
    return main_grad


def deliver_weight_gradient(weight: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor | None:
    """What an autograd function returns for `weight` after its kernel advanced `buffer`."""
    if not weight.requires_grad:
        return None
    if getattr(weight, "main_grad", None) is None:
        return buffer.to(weight.dtype)
    # Megatron's hook adds param.grad unless told that main_grad is complete; it still wants a gradient to arrive.
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return _zero(weight.dtype, weight.device).expand(weight.shape)


@lru_cache(maxsize=16)
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)
