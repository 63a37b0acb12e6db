"""What a trainer process settles about its device before anything is built."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from samebits.into_megatron.config import TrainerConfig


def rank_device(config: TrainerConfig, rank: int) -> torch.device:
    """Where a rank computes: ranks beyond the number of cards share them in turn. ValueError where there is none."""
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device cuda: torch sees no CUDA device here; set device to cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def set_up_device(config: TrainerConfig, device: torch.device) -> None:
    """Threads of the CPU kernels, or the card of this rank."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return
    from samebits import _cpu  # a machine with GPUs may be without it

    _cpu.set_threads(config.threads)
    # Two pools of threads on the same cores wait for each other. Where every heavy operator is ours, torch is
    # left with small ones: measured on 2 busy cores, its own threads made an R step several times slower.
    torch.set_num_threads(1 if config.case.all_strict else config.threads)


def set_up_random_states(config: TrainerConfig) -> None:
    """The random states that Megatron's own attention and recomputed layers take back; there is no dropout, so nothing
    is drawn from them. The process groups must exist."""
    if config.device == "cuda":
        model_parallel_cuda_manual_seed(0, te_rng_tracker=False, inference_rng_tracker=False)
