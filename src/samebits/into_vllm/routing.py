"""From a built vLLM model to a routed one: every module gets the route that the plan gives its group.

Anything that no boundary covers is refused here, before a weight is read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from samebits.contract.routes import Route
from samebits.into_vllm.attention import RoutedAttention, RoutedAttentionLayer
from samebits.into_vllm.calls import Calls
from samebits.into_vllm.compiled import count_calls, graphs
from samebits.into_vllm.layers import ROUTED_LAYERS, Routed
from samebits.into_vllm.places import ARCHITECTURES, NotCovered, Place, places_of
from samebits.into_vllm.plan import RoutePlan
from samebits.into_vllm.proof import class_name

# The part of a model that vLLM compiles.
INNER = "model."


@dataclass
class RoutedModule:
    """One module of the model and the code that computes it."""

    name: str
    place: Place
    route: Route
    module: nn.Module
    seen: list[int] = field(default_factory=lambda: [0])
    compiled: bool = False

    @property
    def nodes(self) -> dict[str, int] | None:
        """The operators of the compiled graphs that are this module's, with their number; None outside of them."""
        if not self.compiled:
            return None
        found: Counter[str] = Counter()
        for graph in graphs():
            found.update(graph["modules"].get(self.name.removeprefix(INNER), {}))
        return dict(found)

    @property
    def calls(self) -> int:
        """How often it computed: counted on the samebits route; natively, whether it was called at all. A module of
        a compiled part ran as often as that part did, if nodes of the compiled graph are its own."""
        if self.nodes == {}:
            return 0
        return self.seen[0] if self.counts is None else self.counts.computed

    @property
    def captured(self) -> int:
        """How often a graph captured a call of it, on the samebits route."""
        return 0 if self.counts is None else self.counts.captured

    @property
    def counts(self) -> Calls | None:
        """The calls of a module on the samebits route."""
        return self.module.calls if isinstance(self.module, Routed | RoutedAttentionLayer) else None

    @property
    def implementation(self) -> str:
        """The class that computes it, with its module."""
        native_attention = type(self.module) is Attention
        return class_name(self.module.impl if native_attention else self.module)

    def note_first_call(self) -> None:
        """A forward hook that records one call and removes itself, so that the native side pays nothing."""

        def seen(*_: Any) -> None:
            self.seen[0] += 1
            handle.remove()

        handle = self.module.register_forward_hook(seen)


def route_model(model: nn.Module, plan: RoutePlan) -> list[RoutedModule]:
    """Give every module of `model` its route. Raises NotCovered for a module that no boundary covers."""
    modules = dict(model.named_modules())
    routed = []
    for name, place in places_of(modules).items():
        route = plan.route(place.group)
        module = modules[name]
        if route == "R":
            _take(name, module, plan.segments)
        elif isinstance(module, Routed):
            module.release()
        routed.append(RoutedModule(name, place, route, module))
    runs = count_calls(_first_attention(modules)) if plan.compiled else [0]
    for one in routed:
        if one.route == "P" and plan.compiled and one.name.startswith(INNER):
            # A hook inside the compiled part would be traced into it.
            one.compiled, one.seen = True, runs
        elif one.route == "P":
            one.note_first_call()
    return routed


def _first_attention(modules: dict[str, nn.Module]) -> nn.Module:
    return next(module for module in modules.values() if type(module) is Attention)


def _take(name: str, module: nn.Module, segments: int) -> None:
    if isinstance(module, Routed):
        module.take(name, segments)
    elif type(module) is Attention and type(module.impl) is RoutedAttention:
        RoutedAttentionLayer.take_over(module)
    else:
        covered = ", ".join(layer.native.__name__ for layer in ROUTED_LAYERS)
        raise NotCovered(f"module {name!r} is a {type(module).__name__}; covered are {covered}")


def check_config(config: VllmConfig, device: str) -> None:
    """Refuse what a module can't know about itself. Raises NotCovered naming the architecture or feature."""
    model = config.model_config
    text = model.hf_config
    if model.architecture not in ARCHITECTURES:
        raise NotCovered(f"architecture {model.architecture!r} is not covered; covered are {', '.join(ARCHITECTURES)}")
    rope = getattr(text, "rope_parameters", None) or {}
    parallel = config.parallel_config
    refused: dict[str, object] = {
        "quantisation": config.quant_config,
        "LoRA": config.lora_config,
        "speculative decoding": config.speculative_config,
        "a KV connector": config.kv_transfer_config,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism inside one engine": parallel.data_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "asynchronous scheduling on a CPU": device == "cpu" and config.scheduler_config.async_scheduling,
        "compilation": config.compilation_config.mode,
        f"dtype {model.dtype}": str(model.dtype) != "torch.bfloat16",
        f"activation {text.hidden_act!r}": text.hidden_act != "silu",
        f"rope scaling {rope.get('rope_type')!r}": rope.get("rope_type", "default") != "default",
        "sliding window": getattr(text, "use_sliding_window", None)
        or "sliding_attention" in (getattr(text, "layer_types", None) or ())
        or (model.architecture == "LlamaForCausalLM" and getattr(text, "sliding_window", None)),
        "a checkpoint with its own LM head under a configuration that ties it": (
            getattr(model, "word_embeddings_untied_by_checkpoint", False)  # not known before 0.26
        ),
    }
    for feature, present in refused.items():
        if present:
            raise NotCovered(f"{model.architecture}: {feature} is not covered")
