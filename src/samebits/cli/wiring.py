"""Bringing vLLM, Megatron-Core and the loop together: the only place that knows all three.

The `build_*` functions run inside the process that hosts what they return.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samebits.contract import RunContract
    from samebits.into_megatron.config import TrainerConfig
    from samebits.into_vllm.config import EngineConfig
    from samebits.rl.config import RunConfig
    from samebits.rl.inputs import Inputs
    from samebits.rl.job import Parts


def parts() -> Parts:
    """How `samebits run` builds its two sides."""
    from samebits.rl.job import Parts

    return Parts(
        engine=build_engine,
        engine_arguments=engine_arguments,
        trainer=build_trainer,
        trainer_arguments=trainer_arguments,
        contract=run_contract_of,
    )


def run_contract_of(config: RunConfig, inputs: Inputs) -> RunContract:
    """The run contract: every boundary, the K segments, and the model's own constants."""
    from samebits.contract import run_contract
    from samebits.ops.boundaries import BOUNDARIES
    from samebits.rl.inputs import model_constants

    return run_contract(BOUNDARIES, segments=config.segments, model=model_constants(inputs.model, config))


def engine_arguments(config: RunConfig, inputs: Inputs, contract: RunContract, index: int) -> tuple[EngineConfig]:
    """Arguments of `build_engine` for one engine. Raises ValueError for what vLLM cannot do."""
    from samebits.into_vllm.config import EngineConfig, RolloutCase
    from samebits.rl.inputs import read_object

    routes = config.routes("rollout")
    limit = read_object(inputs.model / "config.json").get("max_position_embeddings", 1024)
    length = config.max_prompt_length + config.max_response_length
    if length > limit:
        raise ValueError(
            f"max_prompt_length {config.max_prompt_length} + max_response_length "
            f"{config.max_response_length} exceed the model's {limit} positions"
        )
    return (
        EngineConfig(
            model=str(inputs.model),
            case=RolloutCase(**routes),  # type: ignore[arg-type]
            tp=config.rollout_tp,
            max_tp=config.segments,
            contract=contract.as_data() if "R" in routes.values() else {},
            engine=index,
            compiled=config.native_compile,
            seed=config.rollout_seed % (1 << 31),
            max_model_len=length,
            threads=config.threads or _share(config.rollout_engines * config.rollout_tp),
        ),
    )


def trainer_arguments(
    config: RunConfig, inputs: Inputs, contract: RunContract, rank: int, scratch: Path
) -> tuple[TrainerConfig, int, Mapping[str, Any]]:
    """Arguments of `build_trainer` for one rank. Raises ValueError for what Megatron-Core cannot do."""
    from samebits.into_megatron.config import TrainerCase, TrainerConfig
    from samebits.into_megatron.model import read_shape

    # Here and not only in the ranks, so that an unsupported model is refused before anything is written.
    for model in dict.fromkeys((inputs.model, inputs.reference)):
        read_shape(model).check_parallel(config.train_tp, config.segments)
    routes = config.routes("trainer")
    trainer = TrainerConfig(
        model=str(inputs.model),
        reference=str(inputs.reference) if config.kl_coef > 0 else None,
        case=TrainerCase(**routes),  # type: ignore[arg-type]
        tp=config.train_tp,
        cp=config.train_cp,
        max_tp=config.segments,
        contract=contract.digest() if "R" in routes.values() else "",
        lr=config.lr,
        grad_clip=config.clip_grad,
        kl_coef=config.kl_coef,
        clip_low=config.clip_ratio,
        clip_high=config.clip_ratio,
        temperature=config.temperature,
        max_tokens_per_gpu=config.max_tokens_per_gpu,
        threads=config.threads or _share(config.trainer_ranks),
        rendezvous=str(scratch / "rendezvous"),
    )
    return trainer, rank, contract.as_data()


def _share(processes: int) -> int:
    """CPU threads of one of `processes` that work at the same time."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


def build_engine(config: EngineConfig) -> Any:
    """A rollout engine, in this process."""
    from samebits.into_vllm.engine import RolloutEngine

    return RolloutEngine(config)


def build_trainer(config: TrainerConfig, rank: int, contract: Mapping[str, Any]) -> Any:
    """A trainer rank, in this process. Raises ValueError when its boundaries are not those of the run."""
    from samebits.contract import differences
    from samebits.into_megatron.trainer import TrainerRank
    from samebits.ops.boundaries import BOUNDARIES

    own: dict[str, object] = {boundary.name: boundary.as_data() for boundary in BOUNDARIES}
    unlike = differences(dict(contract["boundaries"]), own)
    if unlike:
        raise ValueError(f"this process serves another contract than the run's: {unlike[0]}")
    return TrainerRank(config, rank)
