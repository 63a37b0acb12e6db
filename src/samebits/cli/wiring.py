"""Bringing vLLM, Megatron-Core and the loop together: the only place that knows all three.

The `build_*` functions run inside the process that hosts what they return.
"""

from __future__ import annotations

import os
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
    from samebits.contract.boundaries import BOUNDARIES
    from samebits.rl.inputs import model_constants

    return run_contract(
        BOUNDARIES,
        segments=config.segments,
        model=model_constants(inputs.model, config),
        arithmetic=_arithmetic(config),
    )


def _arithmetic(config: RunConfig) -> str:
    """How the dot products of both sides accumulate. Raises ValueError where the device is not here."""
    if config.device == "cpu":
        return "fma32"
    import torch

    from samebits.backends import device_arithmetic

    if not torch.cuda.is_available():
        raise ValueError("device cuda: torch sees no CUDA device here; leave device out, or set it to cpu")
    return device_arithmetic(torch.device("cuda", 0))


def engine_arguments(config: RunConfig, inputs: Inputs, contract: RunContract, index: int) -> tuple[EngineConfig]:
    """Arguments of `build_engine` for one engine. Raises ValueError for what vLLM cannot do."""
    from samebits.contract.routes import ModuleRoutes
    from samebits.into_vllm.config import EngineConfig
    from samebits.into_vllm.topology import check_cache, check_rollout_layout
    from samebits.rl.inputs import read_object

    routes = config.routes("rollout")
    shape = read_object(inputs.model / "config.json")
    check_rollout_layout(shape, config.rollout_tp, config.segments)
    limit = shape.get("max_position_embeddings") or 1024
    length = config.max_prompt_length + config.max_response_length
    if length > limit:
        raise ValueError(
            f"max_prompt_length {config.max_prompt_length} + max_response_length "
            f"{config.max_response_length} exceed the model's {limit} positions: lower one of them"
        )
    check_cache(shape, config.rollout_tp, length, config.kv_cache_gib)
    return (
        EngineConfig(
            model=str(inputs.model),
            device=config.device,
            kv_cache_gib=config.kv_cache_gib,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            graphs=config.rollout_graphs,
            case=ModuleRoutes(**routes),  # type: ignore[arg-type]
            tp=config.rollout_tp,
            max_tp=config.segments,
            contract=contract.as_data() if "R" in routes.values() else {},
            engine=index,
            cards=engine_cards(config, index),
            compiled=config.native_compile,
            forced=config.replay_tokens is not None,
            seed=config.rollout_seed % (1 << 31),
            max_model_len=length,
            threads=config.threads or _share(config.rollout_engines * config.rollout_tp),
        ),
    )


def engine_cards(config: RunConfig, index: int) -> tuple[int, ...]:
    """Every card of the host, those of this engine's workers first: engines take them in turn, as trainer ranks do.

    Empty on the CPU and where there is one card. ValueError where workers outnumber the cards.
    """
    if config.device == "cpu":
        return ()
    import torch

    count, workers = torch.cuda.device_count(), config.rollout_tp
    if workers > count:
        raise ValueError(f"rollout_tp {workers}: each worker of vLLM needs a card of its own, and there are {count}")
    if count == 1:
        return ()
    own = [(index * workers + rank) % count for rank in range(workers)]
    return (*own, *(card for card in range(count) if card not in own))


def trainer_arguments(
    config: RunConfig, inputs: Inputs, contract: RunContract, rank: int, scratch: Path
) -> tuple[TrainerConfig, int]:
    """Arguments of `build_trainer` for one rank. Raises ValueError for what Megatron-Core cannot do."""
    from samebits.contract.routes import ModuleRoutes
    from samebits.into_megatron.config import TrainerConfig

    routes, engine_routes = config.routes("trainer"), config.routes("rollout")
    trainer = TrainerConfig(
        model=str(inputs.model),
        device=config.device,
        reference=str(inputs.reference) if config.kl_coef > 0 else None,
        case=ModuleRoutes(**routes),  # type: ignore[arg-type]
        tp=config.train_tp,
        sequence_parallel=config.train_sequence_parallel,
        cp=config.train_cp,
        cp_layout=config.train_cp_layout,
        pp=config.train_pp,
        vpp=config.train_vpp,
        dp=config.train_dp,
        recompute=config.train_recompute,
        optimizer_offload=config.train_optimizer_offload,
        vocab_multiple=config.train_vocab_multiple,
        strict_gradients=config.strict_gradients,
        transport=config.train_transport,
        weight_transfer=config.weight_transfer,
        gradient_segments=config.gradient_segments,
        max_tp=config.segments,
        contract=contract.digest() if "R" in routes.values() else "",
        agreed=contract.as_data() if "R" in routes.values() else {},
        rollout_contract=contract.digest() if "R" in engine_routes.values() else "",
        linear_logp_provider=config.linear_logp_provider.strip() or None,
        linear_logp_provider_mode=config.linear_logp_provider_mode,
        linear_logp_contract=_logp_contract(contract) if engine_routes["logp"] == "R" else None,
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
    if rank == 0:
        _check_trainer(trainer)
    return trainer, rank


def _check_trainer(trainer: TrainerConfig) -> None:
    """Raises ValueError for what every rank would refuse: here it is said before anything is written."""
    from samebits.into_megatron.model import read_shape
    from samebits.into_megatron.plan import plan
    from samebits.into_megatron.weights import check_form, read_headers

    for model in dict.fromkeys(path for path in (trainer.model, trainer.reference) if path):
        shape = read_shape(model)
        plan(trainer.layout, shape, trainer.max_tp, trainer.strict_gradients)
        headers = read_headers(model)
        try:
            check_form(headers, shape)
        except ValueError as error:
            raise ValueError(f"{model}: its weights are not what its config.json describes: {error}") from error
    if trainer.linear_logp_provider and (trainer.case.logp == "R" or trainer.linear_logp_provider_mode == "audit"):
        _check_provider(trainer.linear_logp_provider)


def _check_provider(path: str) -> None:
    from samebits.linear_logp.select import load_provider

    try:
        load_provider(path)
    except Exception as error:  # somebody else's module may raise anything
        raise ValueError(
            f"linear_logp_provider: {type(error).__name__}: {error}; "
            "want package.module.name of a callable, or leave it out: samebits has its own"
        ) from error


def _logp_contract(contract: RunContract) -> str:
    """What the trainer's provider must promise: the log-probability's boundary under the run's arithmetic."""
    from samebits.linear_logp.provider import contract_id

    logprob = next(boundary for boundary in contract.boundaries if boundary.name == "logprob")
    return contract_id(logprob.as_data(), contract.arithmetic)


def _share(processes: int) -> int:
    """CPU threads of one of `processes` that work at the same time."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


def build_engine(config: EngineConfig) -> Any:
    """A rollout engine, in this process."""
    from samebits.into_vllm.engine import RolloutEngine

    return RolloutEngine(config)


def build_trainer(config: TrainerConfig, rank: int) -> Any:
    """A trainer rank, in this process. Raises ValueError when it computes by another contract than the run's."""
    from samebits.contract import refusal
    from samebits.into_megatron.proof import contract_held
    from samebits.into_megatron.trainer import TrainerRank

    problem = refusal(f"trainer-{rank}", config.agreed, contract_held(config, rank))
    if problem:
        raise ValueError(problem)
    return TrainerRank(config, rank)
