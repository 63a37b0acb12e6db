"""What ran here: per module the class that really computes, its route, how often it was called; patches in place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from samebits.backends import device_arithmetic
from samebits.backends.identity import kernels
from samebits.contract import digest_of, held_contract, model_constants
from samebits.contract.boundaries import BOUNDARIES
from samebits.into_megatron.config import TrainerConfig
from samebits.into_megatron.device import rank_device
from samebits.linear_logp import LinearLogp
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
    """Forward calls of the modules of all watched models, added up over layers, by forward hooks."""

    def __init__(self) -> None:
        self.modules: dict[str, dict[str, Any]] = {}

    def watch(self, model: torch.nn.Module) -> None:
        """Count the calls of every module of `model` that is a place."""
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


def contract_held(config: TrainerConfig, rank: int = 0) -> dict[str, Any]:
    """The run contract that this rank computes by, as data; empty on a trainer that serves none."""
    if not config.agreed:
        return {}
    shape = json.loads((Path(config.model) / "config.json").read_text(encoding="utf-8"))
    model = {**model_constants(shape), "temperature": config.temperature}
    arithmetic = device_arithmetic(rank_device(config, rank))
    return held_contract(config.agreed, BOUNDARIES, segments=config.max_tp, model=model, arithmetic=arithmetic)


def route_record(
    config: TrainerConfig,
    rank: int,
    device: torch.device,
    calls: CallCounts,
    patches: Iterable[Patch],
    scorer: LinearLogp,
) -> dict[str, Any]:
    """Everything that one rank can say about its routes, as plain data.

    A module's route is read from the class that computes, not from what was asked for. `counters` are advanced by
    the kernels themselves.
    """
    held = contract_held(config, rank)
    modules = {name: dict(record) for name, record in calls.modules.items()}
    native = scorer.calls["native"] or not scorer.configured
    if config.case.logp == "R" and native and "log_probability" in modules:
        modules["log_probability"] |= {"route": "P", "implementation": "native fallback of the provider boundary"}
    return {
        "process": os.getpid(),
        "role": "trainer",
        "rank": rank,
        "mode": "eager",
        "parallel": {**asdict(config.layout), "cp_layout": config.cp_layout},
        "case": config.case.groups(),
        "contract": digest_of(held) if held else "",
        "contract_content": held,
        "segments": config.max_tp,
        "modules": modules,
        "linear_logp": scorer.record(),
        "patches": [patch.record() for patch in patches],
        "versions": {name: version(name) for name in ("megatron-core", "torch", "samebits")},
        "device": str(device),
        **kernels(device),
    }
