"""vLLM's model loader, extended: route every module before weights are read, digest them before they are packed."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from samebits.into_vllm.attention import FusedHeads
from samebits.into_vllm.layers import Routed, share_memory_among_workers
from samebits.into_vllm.lifeline import end_with_parent
from samebits.into_vllm.plan import RoutePlan
from samebits.into_vllm.routing import RoutedModule, check_config, route_model
from samebits.into_vllm.weights import WorkerWeights

if TYPE_CHECKING:
    from samebits.into_vllm.straight import StraightDecoder

LOAD_FORMAT = "samebits"


@dataclasses.dataclass
class WorkerState:
    """What one worker knows about itself: its plan, its routed modules, its weights."""

    plan: RoutePlan
    modules: list[RoutedModule]
    weights: WorkerWeights
    decoder: StraightDecoder | None = None
    fused: list[FusedHeads] = field(default_factory=list)


def loader_for(plan: RoutePlan) -> type[DefaultModelLoader]:
    """The loader class for one plan, to register under LOAD_FORMAT."""

    class RoutedModelLoader(DefaultModelLoader):
        def __init__(self, load_config: LoadConfig) -> None:
            super().__init__(dataclasses.replace(load_config, load_format="safetensors"))

        def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> Any:
            _check_same_plan(plan, vllm_config)
            if vllm_config.parallel_config.world_size > 1:
                end_with_parent()
            if not plan.case.all_native:
                check_config(vllm_config, plan.device)
            shared = plan.device == "cpu" or not plan.case.all_native
            if shared and vllm_config.parallel_config.tensor_parallel_size > 1:
                share_memory_among_workers(plan.device)
            model: Any = super().load_model(vllm_config, model_config, prefix)
            for one in model.samebits.modules:
                if isinstance(one.module, Routed):
                    one.module.ready()
            _speed_up(model, plan, vllm_config)
            return model

        def load_weights(self, model: Any, model_config: ModelConfig) -> None:
            # vLLM has built the model and read no weight yet: in every release this is the first hook after that
            modules = route_model(model, plan)
            dtype = cast("torch.dtype", model_config.dtype)
            model.samebits = WorkerState(plan, modules, WorkerWeights(model, dtype, modules, plan.compiled))
            if plan.random_weights:
                random = DummyModelLoader(dataclasses.replace(self.load_config, load_format="dummy"))
                random.load_weights(model, model_config)
                model.samebits.weights.version = plan.start_version
                return
            super().load_weights(model, model_config)
            model.samebits.weights.loaded(plan.start_version)

    return RoutedModelLoader


def _speed_up(model: Any, plan: RoutePlan, config: VllmConfig) -> None:
    """What costs no bits: on a CPU nothing stands between kernels; on a GPU fewer launches, and certified products."""
    if plan.device == "cpu":
        _straighten(model)
        return
    from samebits.into_vllm.certificates import certify_products  # needs Triton

    certify_products([one.module for one in model.samebits.modules], config)
    if plan.route("attention") == "R":
        blocks = [FusedHeads(module) for module in model.modules() if FusedHeads.fits(module)]
        for block in blocks:
            block.install()
        model.samebits.fused = blocks


def _straighten(model: Any) -> None:
    """Run the decoder as one run of kernel calls where all of it is on the samebits route."""
    from samebits.into_vllm.straight import StraightDecoder

    if StraightDecoder.fits(model, model.samebits.modules):
        model.samebits.decoder = StraightDecoder(model, model.samebits.modules)
        model.samebits.decoder.install(model)


def _check_same_plan(plan: RoutePlan, config: VllmConfig) -> None:
    given = config.additional_config.get("samebits_plan") if isinstance(config.additional_config, dict) else None
    if given != plan.digest():
        raise RuntimeError(
            f"this worker registered the route plan {plan.digest()[:12]}, the engine wants {given!s:.12}: "
            "one process can serve one plan only"
        )
