"""The entry point that vLLM loads in every process (`vllm.general_plugins`). Without a route plan it does nothing.

vLLM swallows plugins that fail to import, so nobody may take registration for granted: the engine asks every
worker for its proof and refuses to start without it.
"""

from __future__ import annotations

from samebits import env
from samebits.into_vllm.plan import PLAN_VARIABLE, RoutePlan

_registered: RoutePlan | None = None


def register() -> None:
    """Replace vLLM's boundaries as the route plan says. Called by vLLM; calling it again changes nothing.

    Raises RuntimeError when this process already serves another plan.
    """
    global _registered
    text = str(env.read(PLAN_VARIABLE))
    plan = RoutePlan.from_json(text) if text else None
    if plan is None or plan == _registered:
        return
    if _registered is not None:
        raise RuntimeError("this process already serves another route plan; start the engine in a process of its own")
    _install(plan)
    _registered = plan


def registered() -> RoutePlan | None:
    """The plan that this process serves."""
    return _registered


def _install(plan: RoutePlan) -> None:
    from vllm.model_executor.model_loader import register_model_loader

    from samebits.into_vllm.loader import LOAD_FORMAT, loader_for
    from samebits.into_vllm.patches import patches_of

    register_model_loader(LOAD_FORMAT)(loader_for(plan))
    for patch in patches_of(plan):
        patch.apply()
    if plan.case.all_native:
        return
    _check_contract(plan)
    if plan.device == "cpu":
        _set_kernel_threads(plan.threads)
    _register_layers()
    if plan.case.attention == "R":
        _register_attention(plan.device)


def _set_kernel_threads(threads: int) -> None:
    from samebits import _cpu

    _cpu.set_threads(threads)


def _check_contract(plan: RoutePlan) -> None:
    """The boundaries that this process computes must be the ones that the run agreed on, version by version."""
    from samebits.contract import held_contract, refusal
    from samebits.contract.boundaries import BOUNDARIES
    from samebits.into_vllm.proof import arithmetic_of

    held = held_contract(plan.contract, BOUNDARIES, segments=plan.segments, arithmetic=arithmetic_of(plan))
    problem = refusal(f"rollout engine {plan.engine}", plan.contract, held)
    if problem:
        raise ValueError(problem)


def _register_layers() -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    from samebits.into_vllm.layers import ROUTED_LAYERS

    for layer in ROUTED_LAYERS:
        name = layer.native.__name__
        if name in op_registry_oot:
            raise RuntimeError(f"another vLLM plugin already replaces {name}: {op_registry_oot[name]}")
        layer.native.register_oot(layer, name=name)  # type: ignore[attr-defined]


def _register_attention(device: str) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if device == "cpu":
        register_backend(AttentionBackendEnum.CPU_ATTN, "samebits.into_vllm.cpu_attention.RoutedAttentionBackend")
    else:
        register_backend(AttentionBackendEnum.CUSTOM, "samebits.into_vllm.gpu_attention.RoutedGPUAttentionBackend")
