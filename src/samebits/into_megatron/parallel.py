"""Process groups of one trainer: gloo over loopback, then Megatron's own groups on top."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state

from samebits.into_megatron.config import TrainerConfig


def start_groups(config: TrainerConfig, rank: int) -> None:
    """Join the trainer's ranks; afterwards Megatron's tensor- and context-parallel groups exist.

    One rank needs no rendezvous file. Raises ValueError for a rank outside the world.
    """
    if not 0 <= rank < config.world_size:
        raise ValueError(f"rank {rank} is outside the trainer's {config.world_size} ranks")
    timeout = timedelta(seconds=config.timeout_seconds)
    if config.world_size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{config.rendezvous}",
            rank=rank,
            world_size=config.world_size,
            timeout=timeout,
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tp,
        context_parallel_size=config.cp,
        create_gloo_process_groups=False,
    )


def stop_groups() -> None:
    """Leave all groups; the process can start others afterwards."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
