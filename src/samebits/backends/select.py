"""One rule: a backend exists for the op or the call fails; unnamed, it is the one of the tensor's device."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import ModuleType

import torch

from samebits.backends.outside import find

ARITHMETICS = ("fma32", "sm90", "cdna3")
OF_DEVICE = {"cpu": "cpu", "cuda": "triton"}  # HIP devices call themselves cuda, too

# what a backend stands on, and what to do where it is missing
_NEEDS = {"samebits._cpu": "the compiled CPU kernels (make build)", "triton": "Triton (pip install triton)"}


class NoBackend(ValueError):
    """The named backend does not serve this op, this device or this arithmetic."""


class Backends(Mapping[str, ModuleType]):
    """The backends of one op by name, each imported when it is first looked up."""

    def __init__(self, room: str, *names: str) -> None:
        self._room, self._names = room, names
        self._loaded: dict[str, ModuleType] = {}

    def __getitem__(self, name: str) -> ModuleType:
        """The module; KeyError for a name that the op does not have, NoBackend where its foundation is missing."""
        module = self._loaded.get(name)
        if module is not None:
            return module
        if name not in self._names:
            module = self._loaded[name] = self._from_outside(name)
            return module
        try:
            module = importlib.import_module(f"{self._room}.{name}")
        except ImportError as error:
            need = next((need for part, need in _NEEDS.items() if _lacks(part, error)), None)
            if need is None:
                raise
            raise NoBackend(f"{self._room}: backend {name!r} needs {need}, which is not installed here") from error
        self._loaded[name] = module
        return module

    def _from_outside(self, name: str) -> ModuleType:
        module = find(self._room.rpartition(".")[2], name)
        if module is None:
            raise KeyError(name)
        return module

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _lacks(part: str, error: ImportError) -> bool:
    """Did an import fail because `part` is missing? `from samebits import _cpu` names only the package."""
    return error.name in (part, part.rpartition(".")[0] or part) and importlib.util.find_spec(part) is None


def lazy(room: str, *names: str) -> Backends:
    """The backends `names` of the op in package `room`; importing the op imports none of them."""
    return Backends(room, *names)


def pick(
    op: str, backends: Mapping[str, ModuleType], name: str | None, x: torch.Tensor, *others: torch.Tensor | None
) -> ModuleType:
    """The module that implements `op` under `name`, or for the device of `x` where no name is given.

    NoBackend names what exists instead. The compiled CPU kernels read the tensors of a call by address: one in
    other memory is refused here.
    """
    if name is None:
        device = x.device.type
        if device not in OF_DEVICE:
            raise NoBackend(f"{op}: no backend for tensors on {device}; there is one for {', '.join(OF_DEVICE)}")
        name = OF_DEVICE[device]
    if name == "cpu":
        for tensor in (x, *others):
            if tensor is not None and not tensor.is_cpu:
                raise NoBackend(f"{op}: backend 'cpu' takes tensors on the CPU, got one on {tensor.device}; move it")
    try:
        return backends[name]
    except KeyError:
        raise NoBackend(f"{op}: no backend {name!r}; it has {', '.join(sorted(backends))}") from None


def pick_arithmetic(op: str, name: str | None, x: torch.Tensor) -> str:
    """How dot products of `op` accumulate: `name`, or the arithmetic of the device of `x`. ValueError if unknown."""
    if name is None:
        return device_arithmetic(x.device) if x.is_cuda else "fma32"
    if name not in ARITHMETICS:
        raise ValueError(f"{op}: no arithmetic {name!r}; there is {', '.join(ARITHMETICS)}")
    return name


@lru_cache(maxsize=64)
def device_arithmetic(device: torch.device) -> str:
    """What the matrix unit of a device computes: sm90 on H100 and H200, cdna3 on MI300X, fma32 elsewhere."""
    if device.type != "cuda":
        return "fma32"
    if torch.version.hip is not None:
        architecture = torch.cuda.get_device_properties(device).gcnArchName
        return "cdna3" if architecture.startswith("gfx942") else "fma32"
    return "sm90" if torch.cuda.get_device_capability(device) == (9, 0) else "fma32"


def serve_only(op: str, backend: str, arithmetic: str, *served: str) -> None:
    """Raise NoBackend unless `backend` of `op` computes in `arithmetic`."""
    if arithmetic not in served:
        raise NoBackend(
            f"{op}: backend {backend!r} computes in {', '.join(served)}, not in {arithmetic}; "
            f"backend='reference' has every arithmetic"
        )
