"""What a provider's answer must be before anybody uses it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from samebits.linear_logp.types import LinearLogpRequest, LinearLogpResult

LONGEST_IDENTITY = 400  # of ASCII, with quotes and escapes: ranks tell each other both in one record of fixed size
_FIELDS = tuple(field.name for field in fields(LinearLogpResult))


def normalise(raw: Any) -> LinearLogpResult:
    """A LinearLogpResult from one, from a mapping, or from an object with its attributes.

    Everything but `logp` may be missing. Raises TypeError for anything else, ValueError for unknown keys.
    """
    if isinstance(raw, LinearLogpResult):
        return raw
    if isinstance(raw, Mapping):
        unknown = sorted(str(key) for key in raw if key not in _FIELDS)
        if unknown:
            raise ValueError(f"malformed result: unknown keys {', '.join(unknown)}; known: {', '.join(_FIELDS)}")
        found = dict(raw)
    else:
        found = {name: getattr(raw, name) for name in _FIELDS if hasattr(raw, name)}
    if "logp" not in found:
        raise TypeError(f"malformed result: {type(raw).__name__} carries no logp; return a LinearLogpResult")
    return LinearLogpResult(**found)


def check_result(result: LinearLogpResult, request: LinearLogpRequest) -> None:
    """The rules of every mode: types, shapes, devices. Raises TypeError or ValueError naming the field."""
    device = request.target_ids.device
    _check_scores("logp", result.logp, (request.rows, 1), device)
    if request.with_entropy:
        if result.entropy is None:
            raise ValueError("malformed result: entropy was asked for, got None")
        _check_scores("entropy", result.entropy, (request.rows,), device)
    elif result.entropy is not None:
        raise ValueError("malformed result: entropy was not asked for; return None")
    for name in ("backend_id", "contract_id"):
        if not isinstance(getattr(result, name), str):
            raise TypeError(f"malformed result: {name} must be a string, got {type(getattr(result, name)).__name__}")
        length = len(ascii(getattr(result, name)))
        if length > LONGEST_IDENTITY:
            raise ValueError(f"malformed result: {name} has {length} characters, at most {LONGEST_IDENTITY} are told")
    if not isinstance(result.provenance, Mapping):
        raise TypeError(f"malformed result: provenance must be a mapping, got {type(result.provenance).__name__}")


def _check_scores(name: str, scores: object, shape: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(scores, Tensor):
        raise TypeError(f"malformed result: {name} must be a tensor, got {type(scores).__name__}")
    if not scores.is_floating_point():
        raise TypeError(f"malformed result: {name} must be floating point, got {scores.dtype}")
    if scores.shape != shape:
        raise ValueError(f"malformed result: {name} must be {list(shape)}, got {list(scores.shape)}")
    if scores.device != device:
        raise ValueError(f"malformed result: {name} is on {scores.device}, the request is on {device}")


def check_strictly(result: LinearLogpResult, request: LinearLogpRequest) -> None:
    """The further rules of strict mode, for a result that `check_result` passed. Raises ValueError."""
    for name in ("backend_id", "contract_id"):
        if not getattr(result, name).strip():
            raise ValueError(f"strict: the result has no {name}; say what ran and which arithmetic it promises")
    scores = {"logp": result.logp}
    if result.entropy is not None:
        scores["entropy"] = result.entropy
    inputs = request.differentiable_inputs()
    for name, tensor in scores.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"strict: {name} must be float32, got {tensor.dtype}")
        values = tensor.detach() if request.active is None else tensor.detach()[request.active]
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"strict: {name} is not finite on {int((~torch.isfinite(values)).sum())} active rows")
        if name == "logp" or request.with_entropy_grad:
            unreached = missing_gradients(tensor, inputs)
            if unreached:
                raise ValueError(f"strict: {name} is detached: no gradient reaches {', '.join(unreached)}")


def missing_gradients(output: Tensor, inputs: Mapping[str, Tensor]) -> list[str]:
    """The names of `inputs` that a backward pass from `output` would not reach."""
    if not inputs:
        return []
    if output.grad_fn is None:
        return list(inputs)
    wanted = {name: get_gradient_edge(tensor).node for name, tensor in inputs.items()}
    return _not_found(output.grad_fn, wanted)


def _not_found(start: Any, wanted: Mapping[str, Any]) -> list[str]:
    missing = dict(wanted)
    seen, open_nodes = {start}, [start]
    while open_nodes and missing:
        node = open_nodes.pop()
        missing = {name: end for name, end in missing.items() if end is not node}
        # The graph behind an input is the model's own and has no further input in it.
        if any(node is end for end in wanted.values()):
            continue
        for following in _following(node):
            if following not in seen:
                seen.add(following)
                open_nodes.append(following)
    return list(missing)


def _following(node: Any) -> Iterable[Any]:
    return (following for following, _ in node.next_functions if following is not None)
