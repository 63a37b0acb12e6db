"""What ran here: per module the class that really computes, its route, how often it was called; patches in place."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from samebits import _cpu
from samebits.into_megatron.config import TrainerConfig
from samebits.patching import Patch

# Where a module's name ends: the boundary it computes, and the group of the case that decides its route.
PLACES = {
    "embedding.word_embeddings": ("embedding", "embedding"),
    "input_layernorm": ("rms_norm", "attention"),
    "self_attention.linear_qkv": ("linear", "attention"),
    "self_attention.q_layernorm": ("rms_norm", "attention"),
    "self_attention.k_layernorm": ("rms_norm", "attention"),
    "self_attention": ("rotary", "attention"),
    "self_attention.core_attention": ("attention", "attention"),
    "self_attention.linear_proj": ("linear", "attention"),
    "pre_mlp_layernorm": ("rms_norm", "ffn"),
    "mlp.linear_fc1": ("linear", "ffn"),
    "mlp": ("swiglu", "ffn"),
    "mlp.activation_func": ("swiglu", "ffn"),
    "mlp.linear_fc2": ("linear", "ffn"),
    "decoder.final_layernorm": ("rms_norm", "logp"),
    "log_probability": ("logprob", "logp"),
}


class CallCounts:
    """Forward calls of one model's modules, added up over layers, by forward hooks."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules: dict[str, dict[str, Any]] = {}
        for name, module in model.named_modules():
            place = self._place(name)
            # An MLP with an activation module of its own, or an embedding that we only read, computes nothing itself.
            if place is None or (place == "mlp" and getattr(module, "activation_func", None) in module.children()):
                continue
            module.register_forward_hook(self.counter(place, type(module)))

    @staticmethod
    def _place(name: str) -> str | None:
        ends = [end for end in PLACES if name == end or name.endswith("." + end)]
        return max(ends, key=len, default=None)

    def counter(self, place: str, computed_by: type | Callable[..., Any]) -> Callable[..., None]:
        """A hook (any arguments) that counts one call of `place`, computed by this class or function."""
        boundary, group = PLACES[place]
        implementation = f"{computed_by.__module__}.{computed_by.__qualname__}"
        record = self.modules.setdefault(
            place,
            {
                "group": group,
                "boundary": boundary,
                "route": "R" if implementation.startswith("samebits.") else "P",
                "implementation": implementation,
                "calls": 0,
            },
        )

        def count(*unused: Any) -> None:
            record["calls"] += 1

        return count


def route_record(config: TrainerConfig, rank: int, calls: CallCounts, patches: Iterable[Patch]) -> dict[str, Any]:
    """Everything that one rank can say about its routes, as plain data.

    A module's route is read from the class that computes, not from what was asked for. `counters` are advanced by
    the kernels themselves.
    """
    return {
        "process": os.getpid(),
        "role": "trainer",
        "rank": rank,
        "mode": "eager",
        "parallel": {"tp": config.tp, "cp": config.cp, "sequence_parallel": config.sequence_parallel},
        "case": config.case.groups(),
        "contract": config.contract,
        "segments": config.max_tp,
        "modules": {name: dict(record) for name, record in calls.modules.items()},
        "patches": [patch.record() for patch in patches],
        "versions": {name: version(name) for name in ("megatron-core", "torch", "samebits")},
        "kernels": hashlib.sha256(Path(_cpu.__file__).read_bytes()).hexdigest(),
        "instruction_set": _cpu.instruction_set(),
        "counters": dict(_cpu.counters()),
    }
