"""A stand-in for vime's provider module, written from its published field lists and rules, in both revisions.

E is the earlier revision, L the later one. They share the fields; their checks and their dispatch differ.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLayout:
    world_size: int
    rank: int
    layout: str


@dataclass(frozen=True)
class LinearProjection:
    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class VocabPartition:
    local_start: int
    local_size: int
    real_size: int
    padded_size: int


@dataclass(frozen=True)
class LinearLogpContext:
    hidden: Tensor
    projection: LinearProjection
    vocab_partition: VocabPartition


@dataclass(frozen=True)
class LinearLogpRequest:
    logits: Tensor
    target_ids: Tensor
    tensor_parallel_group: Any
    token_layout: TokenLayout
    with_entropy: bool
    with_entropy_grad: bool
    chunk_size: int
    log_prob_keep_mask: Tensor | None = None
    context: LinearLogpContext | None = None
    temperature: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


Revision = Literal["E", "L"]
FIELDS = ("logp", "entropy", "backend_id", "contract_id", "provenance")


def compute_linear_logp(
    *, path: str, mode: str, request: LinearLogpRequest, native: Callable[[], Any], revision: Revision
) -> tuple[Tensor, Tensor | None]:
    module, _, attribute = path.rpartition(".")
    provider = getattr(importlib.import_module(module), attribute)
    try:
        raw = provider(request)
    except Exception as error:
        if getattr(error, "linear_logp_provider_unavailable", False):
            if mode == "strict":
                raise RuntimeError(f"{path} is unavailable") from error
            return native()  # type: ignore[no-any-return]
        raise
    values = {name: raw[name] if isinstance(raw, Mapping) else getattr(raw, name) for name in FIELDS}
    check = check_earlier if revision == "E" else check_later
    check(values, request, strict=mode == "strict")
    return values["logp"], values["entropy"]


def check_earlier(values: dict[str, Any], request: LinearLogpRequest, *, strict: bool) -> None:
    logp, entropy, rows = values["logp"], values["entropy"], request.logits.size(0)
    if logp.shape != (rows, 1) or logp.device != request.logits.device:
        raise ValueError("logp has a wrong shape or device")
    if not logp.is_floating_point():
        raise ValueError("logp is not floating")
    if request.with_entropy:
        if entropy is None or entropy.shape != (rows,):
            raise ValueError("entropy is missing or has a wrong shape")
    elif entropy is not None:
        raise ValueError("entropy was not asked for")
    if strict:
        if not values["backend_id"] or not values["contract_id"]:
            raise ValueError("an identity is empty")
        if request.logits.requires_grad and not logp.requires_grad:
            raise ValueError("logp is detached")
        if request.with_entropy_grad and not entropy.requires_grad:
            raise ValueError("entropy is detached")


def check_later(values: dict[str, Any], request: LinearLogpRequest, *, strict: bool) -> None:
    if not isinstance(values["logp"], Tensor) or not values["logp"].is_floating_point():
        raise TypeError("logp is no floating tensor")
    check_earlier(values, request, strict=strict)
    entropy = values["entropy"]
    if entropy is not None and (entropy.device != values["logp"].device or entropy.dtype != values["logp"].dtype):
        raise ValueError("entropy has another device or dtype than logp")
    if not isinstance(values["provenance"], Mapping):
        raise TypeError("provenance is no mapping")


def check_temperature_later(temperature: Any, rows: int) -> None:
    """The later revision checks the temperature of a request."""
    if isinstance(temperature, torch.Tensor):
        if temperature.numel() not in (1, rows) or not bool((temperature > 0).all()):
            raise ValueError("temperature has a wrong size or sign")
    elif temperature is not None and not temperature > 0:
        raise ValueError("temperature is not positive")
