"""vLLM's engine arguments and the environment of one rollout engine, from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samebits import env
from samebits.into_vllm import pieces
from samebits.into_vllm.config import EngineConfig
from samebits.into_vllm.plan import PLAN_VARIABLE, RoutePlan

_GIB = 1 << 30
_FREE_AT_START = 0.01  # of the card: others live there, and the cache has a size of its own
SOCKET_FOLDER = 70  # bytes of its path at most: that of a Unix socket has 107, its name here 37


def engine_arguments(config: EngineConfig, plan: RoutePlan) -> dict[str, Any]:
    """vLLM's engine arguments. Eager unless asked otherwise: starting takes seconds instead of a minute."""
    processors = ["samebits.into_vllm.sampling:SampleKeys"] if config.case.logp == "R" else []
    processors += ["samebits.into_vllm.forced:ForcedTokens"] if config.forced else []
    return {
        **(_gpu_arguments(config) if config.device == "cuda" else {}),
        "model": config.model,
        "load_format": "samebits",
        "worker_extension_cls": "samebits.into_vllm.worker.SamebitsWorker",
        "additional_config": {"samebits_plan": plan.digest()},
        "logits_processors": processors or None,
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": config.tp,
        "distributed_executor_backend": "mp" if config.tp > 1 else "uni",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enforce_eager": not (config.compiled or plan.graphs),
        **_compiler(config),
        "generation_config": "vllm",
        "seed": config.seed,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "block_size": config.block_size,
        "enable_prefix_caching": config.prefix_caching,
        "enable_chunked_prefill": True,
        "kv_cache_memory_bytes": int(config.kv_cache_gib * _GIB),
        **({"gpu_memory_utilization": _FREE_AT_START} if config.device == "cuda" else {}),
        "disable_log_stats": True,
    }


def _compiler(config: EngineConfig) -> dict[str, Any]:
    """The compiled mode as it is; on a CPU with a witness of what it compiles, which on a GPU is a patch."""
    if not config.compiled or config.device == "cuda":
        return {}
    from samebits.into_vllm.compiled import inductor_settings

    return {"compilation_config": {"inductor_compile_config": inductor_settings()}}


def _gpu_arguments(config: EngineConfig) -> dict[str, Any]:
    """Graphs without vLLM's compiler where a part is on the samebits route; vLLM's own choice else.

    Decode batches are captured whole; others in pieces between attention calls where this vLLM can do that without
    its compiler, else whole, too.
    """
    if config.case.all_native:
        return {}
    ours: dict[str, Any] = {}
    if config.tp > 1:
        ours["disable_custom_all_reduce"] = True  # ours takes its place
    if config.graphs:
        mode = "FULL_AND_PIECEWISE" if pieces.are_there() else "FULL"
        ours["compilation_config"] = {"mode": 0, "cudagraph_mode": mode}
        if config.capture_sizes:
            ours["compilation_config"]["cudagraph_capture_sizes"] = list(config.capture_sizes)
    if config.case.attention == "R":
        ours["attention_backend"] = "CUSTOM"
    return ours


def environment(
    config: EngineConfig, plan: RoutePlan, cpus: Sequence[int], threads: int, sockets: str
) -> dict[str, str]:
    """Variables that torch, vLLM and the plugin read, here and in the workers, whose sockets lie in `sockets`."""
    return {
        PLAN_VARIABLE: plan.to_json(),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": sockets,
        # A whole compiled model from vLLM's own cache would come without its graphs.
        **({"VLLM_USE_AOT_COMPILE": "0"} if config.compiled else {}),
        **({pieces.SWITCH: "1"} if plan.graphs and not config.case.all_native else {}),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        **(_cpu_environment(config, cpus, threads) if config.device == "cpu" else {}),
        **({"CUDA_VISIBLE_DEVICES": visible(config.cards)} if config.cards else {}),
    }


def visible(cards: Sequence[int]) -> str:
    """Cards, numbered as this process sees them, in the words of the variable that shows them to a process."""
    seen = str(env.read("CUDA_VISIBLE_DEVICES"))
    names = seen.split(",") if seen else [str(card) for card in range(max(cards) + 1)]
    return ",".join(names[card] for card in cards)


def _cpu_environment(config: EngineConfig, cpus: Sequence[int], threads: int) -> dict[str, str]:
    """Which cores each worker uses."""
    shares = [[cpus[(rank * threads + i) % len(cpus)] for i in range(threads)] for rank in range(config.tp)]
    bind = "|".join(",".join(str(cpu) for cpu in sorted(set(share))) for share in shares)
    return {
        "VLLM_CPU_OMP_THREADS_BIND": bind if config.tp > 1 else "nobind",
        "OMP_NUM_THREADS": str(torch_threads(config, threads)),
    }


def torch_threads(config: EngineConfig, threads: int) -> int:
    """Where samebits computes everything, torch keeps one thread: its idle OpenMP threads would spin for
    milliseconds on the cores that the kernels' own threads need."""
    return 1 if config.case.all_strict else threads
