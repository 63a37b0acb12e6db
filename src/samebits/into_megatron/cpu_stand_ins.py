"""Patches that let Megatron-Core run where there is no CUDA device. They change where tensors live, not values.

Applied in the trainer process only, and only when it computes on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch

from samebits.patching import Patch, Symbol


def _cpu_device() -> torch.device:
    return torch.device("cpu")


@contextlib.contextmanager
def _no_fork(self: Any, name: str = "") -> Iterator[None]:
    yield


def _nothing(*unused: Any) -> None:
    return None


def _no_states() -> tuple[()]:
    return ()


def _itself(self: torch.Tensor, *unused: Any, **options: Any) -> torch.Tensor:
    return self


class _CpuTorch(ModuleType):
    """`torch` as one Megatron module sees it: tensors asked for on "cuda" are made on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(data: Any, *, device: str | torch.device | None = None, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(data, device="cpu" if device == "cuda" else device, **kwargs)

    @staticmethod
    def zeros(size: Any, *, device: str | torch.device | None = None, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(size, device="cpu" if device == "cuda" else device, **kwargs)


def _cuda_typed(original: Callable[..., Any]) -> Callable[..., Any]:
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kind = original(self, *args, **kwargs)
        return kind.replace("torch.", "torch.cuda.", 1) if isinstance(kind, str) else kind

    return type_


def _megatron(path: str) -> Symbol:
    return Symbol(path=path, distribution="megatron-core", holds_for=">=0.16,<0.17")


def _torch(path: str) -> Symbol:
    return Symbol(path=path, distribution="torch", holds_for=">=2.11,<2.14")


# For the life of the trainer process.
RESIDENT = (
    Patch(
        symbol=_torch("torch.cuda:current_device"),
        why="Megatron allocates gradient buffers, gathered tensors and rotary tables on torch.cuda.current_device()",
        make=lambda original: _cpu_device,
    ),
    Patch(
        symbol=_megatron("megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork"),
        why="Megatron forks the CUDA random state around dropout; dropout is 0 and there is no such state",
        make=lambda original: _no_fork,
    ),
    Patch(
        symbol=_megatron("megatron.core.pipeline_parallel.schedules:torch"),
        why='the schedules count tokens in a tensor made with device="cuda"',
        make=lambda original: _CpuTorch(),
    ),
    Patch(
        symbol=_torch("torch.cuda:synchronize"),
        why="pipeline stages wait for the device after telling each other a length; on a CPU that is done already",
        make=lambda original: _nothing,
    ),
    Patch(
        symbol=_megatron("megatron.core.tensor_parallel.random:_get_all_rng_states"),
        why="recomputed layers take back the CUDA random state of their first run; there is none",
        make=lambda original: _no_states,
    ),
    Patch(
        symbol=_megatron("megatron.core.tensor_parallel.random:_set_all_rng_states"),
        why="as above: nothing to set",
        make=lambda original: _nothing,
    ),
)

# Only while the model is built.
MODEL_SETUP = (
    Patch(
        symbol=_torch("torch:Tensor.cuda"),
        why="a tied table on the last pipeline stage is moved to CUDA before it is copied from the first",
        make=lambda original: _itself,
    ),
)

# Only while the optimizer is built.
OPTIMIZER_SETUP = (
    Patch(
        symbol=_megatron("megatron.core.optimizer.optimizer:torch"),
        why='the mixed-precision optimizer makes its scale tensor with device="cuda"',
        make=lambda original: _CpuTorch(),
    ),
    Patch(
        symbol=_torch("torch:Tensor.type"),
        why="the mixed-precision optimizer accepts only parameters whose type() says torch.cuda",
        make=_cuda_typed,
    ),
)


def resident(device: str) -> tuple[Patch, ...]:
    """The stand-ins that a trainer on this device needs for its life."""
    return RESIDENT if device == "cpu" else ()


@contextlib.contextmanager
def in_place(patches: Iterable[Patch], device: str = "cpu") -> Iterator[None]:
    """These stand-ins in place for the length of the block, if the device is the CPU."""
    with contextlib.ExitStack() as stack:
        for patch in patches if device == "cpu" else ():
            stack.enter_context(patch.applied())
        yield
