"""What ran here: per module its route and how often it was called, and which patches are in place."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from typing import Any

import torch

from samebits.into_megatron.config import TrainerCase

# Where a module's name ends, which group it belongs to.
GROUP_OF = {
    "input_layernorm": "attention",
    "self_attention.linear_qkv": "attention",
    "self_attention.q_layernorm": "attention",
    "self_attention.k_layernorm": "attention",
    "self_attention.core_attention": "attention",
    "self_attention.linear_proj": "attention",
    "pre_mlp_layernorm": "ffn",
    "mlp.linear_fc1": "ffn",
    "mlp.activation_func": "ffn",
    "mlp.linear_fc2": "ffn",
    "decoder.final_layernorm": "logp",
}


class CallCounts:
    """Counts the forward calls of a model's modules by class and group, through forward hooks."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        for name, module in model.named_modules():
            suffix = next((end for end in GROUP_OF if name.endswith(end)), None)
            if suffix is not None:
                module.register_forward_hook(self._count(suffix, type(module)))

    def _count(self, suffix: str, kind: type) -> Any:
        key = (suffix, f"{kind.__module__}:{kind.__qualname__}")

        def hook(*unused: Any) -> None:
            self.calls[key] += 1

        return hook

    def as_data(self, case: TrainerCase) -> dict[str, dict[str, Any]]:
        """Per boundary: the route that was asked for, the class that ran, and its calls so far."""
        groups = case.groups()
        return {
            suffix: {"group": GROUP_OF[suffix], "route": groups[GROUP_OF[suffix]], "class": kind, "calls": calls}
            for (suffix, kind), calls in sorted(self.calls.items())
        }


def versions() -> dict[str, str]:
    """Installed versions of what this process computes with."""
    return {name: version(name) for name in ("samebits", "megatron-core", "torch")}
