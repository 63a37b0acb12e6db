"""Small requests, and stand-in providers that can be named by a dotted path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from samebits.linear_logp import (
    LinearLogpContext,
    LinearLogpRequest,
    LinearLogpResult,
    LinearProjection,
    ProviderSettings,
    VocabPartition,
)

ROWS, HIDDEN, REAL, PADDED = 12, 16, 37, 40


def context(rows: int = ROWS, *, bias: bool = True, grad: bool = True, real: int = REAL) -> LinearLogpContext:
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, HIDDEN, generator=draw).bfloat16().requires_grad_(grad)
    weight = torch.randn(PADDED, HIDDEN, generator=draw).bfloat16().requires_grad_(grad)
    offset = torch.randn(PADDED, generator=draw).bfloat16().requires_grad_(grad) if bias else None
    return LinearLogpContext(hidden, LinearProjection(weight, offset), VocabPartition(0, PADDED, real, PADDED))


def request(rows: int = ROWS, **changes: Any) -> LinearLogpRequest:
    targets = torch.randint(0, REAL, (rows,), generator=torch.Generator().manual_seed(2))
    settings: dict[str, Any] = {"logits": None, "target_ids": targets}
    if "context" not in changes:
        settings["context"] = context(rows)
    return LinearLogpRequest(**{**settings, **changes})


def exact(asked: LinearLogpRequest) -> Tensor:
    """fp64 log-softmax [T, real] of a request's context, temperature included."""
    assert asked.context is not None
    projection, real = asked.context.projection, asked.context.vocab_partition.real_size
    z = asked.context.hidden.double() @ projection.weight.double().t()
    if projection.bias is not None:
        z = z + projection.bias.double()
    temperature = asked.temperature
    column = temperature[:, None].double() if isinstance(temperature, Tensor) else temperature
    return (z[:, :real] / column).log_softmax(-1)


def good(asked: LinearLogpRequest, **changes: Any) -> LinearLogpResult:
    """What a sound provider written with plain torch returns, with some fields changed."""
    logp = exact(asked).float()
    entropy = -(logp.exp() * logp).sum(-1) if asked.with_entropy else None
    fields: dict[str, Any] = {
        "logp": logp.gather(1, asked.target_ids[:, None]),
        "entropy": entropy,
        "backend_id": "torch",
        "contract_id": "plain.v1",
        "provenance": {"route": "R"},
    }
    return LinearLogpResult(**{**fields, **changes})


def native(asked: LinearLogpRequest) -> tuple[Tensor, Tensor | None]:
    """A framework's own path: recognisable by its values."""
    return torch.full((asked.rows, 1), -7.0), torch.full((asked.rows,), 3.0) if asked.with_entropy else None


def is_native(scores: tuple[Tensor, Tensor | None]) -> bool:
    return bool((scores[0] == -7.0).all())


def installed(provider: Callable[[LinearLogpRequest], Any], name: str = "stand_in_provider") -> str:
    """The dotted path under which `provider` can be imported from now on."""
    module = ModuleType(name)
    module.provider = provider  # type: ignore[attr-defined]
    sys.modules[name] = module
    return f"{name}.provider"


def settings(provider: Callable[[LinearLogpRequest], Any], mode: Any = "strict", **changes: Any) -> ProviderSettings:
    return ProviderSettings(
        path=installed(provider), mode=mode, **{"route": "P" if mode == "audit" else "R", **changes}
    )
