"""Process groups of one trainer: gloo, with NCCL beside it where each rank has a card; then Megatron's own on top."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from samebits.collectives import attach, detach, gather_states
from samebits.into_megatron.config import TrainerConfig
from samebits.into_megatron.gpt import ScoringModel
from samebits.into_megatron.model import ModelShape
from samebits.into_megatron.weights import Mapped, parameter_map


def _backend(config: TrainerConfig) -> str:
    """What carries the collectives of torch.distributed: gloo; NCCL for tensors on cards if each rank has its own."""
    if config.device == "cpu" or not 1 < config.world_size <= torch.cuda.device_count():
        return "gloo"
    return "cpu:gloo,cuda:nccl"


def start_groups(config: TrainerConfig, rank: int) -> None:
    """Join the trainer's ranks; afterwards all of Megatron's groups exist.

    One rank needs no rendezvous file. Raises ValueError for a rank outside the world.
    """
    if not 0 <= rank < config.world_size:
        raise ValueError(f"rank {rank} is outside the trainer's {config.world_size} ranks")
    timeout, backend = timedelta(seconds=config.timeout_seconds), _backend(config)
    if config.pp > 1 and config.device == "cuda" and backend == "gloo":
        raise ValueError("pipeline stages need a card each: gloo does not send from card to card; set pp to 1")
    # A store and not a URL, in which a path would be cut at a "#" or "?".
    store = dist.HashStore() if config.world_size == 1 else dist.FileStore(config.rendezvous, config.world_size)
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=config.world_size, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tp,
        context_parallel_size=config.cp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.vpp if config.vpp > 1 else None,
        create_gloo_process_groups=False,
    )
    for group in _groups():
        attach(group, config.transport, timeout=config.timeout_seconds)


def _groups() -> list[dist.ProcessGroup]:
    """Every group that our collectives meet in."""
    found = [
        dist.group.WORLD,
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_model_parallel_group(),
        parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
    ]
    return list(dict.fromkeys(found))


def gather_parameters(chunks: Sequence[ScoringModel], shape: ModelShape) -> Iterator[tuple[Mapped, list[Tensor]]]:
    """Each parameter of the model, from all pipeline ranks: its shards of all tensor-parallel ranks.

    All ranks must take them all; all get copies, one parameter at a time. A tied table comes from the stage of the
    embedding.
    """
    tensor, stages = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    own = {chunk.whole_name(name): p.detach() for chunk in chunks for name, p in chunk.named_parameters()}
    device = next(iter(own.values())).device
    mapped = parameter_map(shape)
    # Who has what, in one exchange; then each parameter from its first owner, so that no shape is guessed.
    have = gather_states(torch.tensor([entry.name in own for entry in mapped], dtype=torch.uint8), stages)
    for entry, owner in zip(mapped, have.argmax(0).tolist(), strict=True):
        parameter = own[entry.name] if stages.rank() == owner else None
        yield entry, list(gather_states(_from_stage(parameter, owner, stages, device), tensor))


def _from_stage(own: Tensor | None, owner: int, stages: dist.ProcessGroup, device: torch.device) -> Tensor:
    """The tensor of one pipeline rank, on all of them."""
    if stages.size() == 1:
        assert own is not None
        return own
    size = [0, 0] if own is None else [*own.shape, *([0] * (2 - own.dim()))]
    rows, columns = gather_states(torch.tensor(size), stages)[owner].tolist()
    shape = (rows, columns) if columns else (rows,)
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=device) if own is None else own.clone()
    dist.broadcast(tensor.view(torch.uint8), dist.get_global_rank(stages, owner), group=stages)
    return tensor


def stop_groups() -> None:
    """Leave all groups; the process can start others afterwards."""
    if parallel_state.is_initialized():
        for group in _groups():
            detach(group)
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
