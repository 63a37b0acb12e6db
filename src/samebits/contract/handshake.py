"""How trainer and rollout workers exchange their contracts: each states what it computes by; a difference is named.

A digest that a process was merely given would agree with itself for ever. So every process makes the content from
its own boundaries, its own number of K segments and the model that it reads, and sends that with its digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from samebits.contract.boundary import Boundary, digest_of
from samebits.contract.run import differences, run_contract

SHOWN = 12  # fields of a refusal
WIDTH = 60  # characters of a value of one side


def model_constants(shape: Mapping[str, Any]) -> dict[str, object]:
    """What of a model's config.json (as data) belongs into the run contract, besides its weights.

    Raises ValueError where it has another form than a config.json.
    """
    rope, architectures = shape.get("rope_parameters") or {}, shape.get("architectures") or []
    if not isinstance(rope, Mapping) or not isinstance(architectures, list):
        raise ValueError("config.json: rope_parameters must be an object and architectures a list")
    names = ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps")
    constants: dict[str, object] = {name: shape.get(name) for name in names}
    constants["rope_theta"] = rope.get("rope_theta", shape.get("rope_theta"))
    constants["architecture"] = ",".join(map(str, architectures))
    return constants


def held_contract(
    agreed: Mapping[str, Any],
    boundaries: Iterable[Boundary],
    *,
    segments: int,
    model: Mapping[str, object] | None = None,
    arithmetic: str = "fma32",
) -> dict[str, Any]:
    """The run contract that this process computes by, as data.

    `boundaries`, `segments`, `arithmetic` and the constants in `model` are the process's own. Constants of the model
    that `agreed` names and this process doesn't hold (an engine gets the temperature with each request) are taken
    from it.
    """
    own = model or {}
    constants = {name: own.get(name, value) for name, value in agreed.get("model", {}).items()}
    return run_contract(boundaries, segments=segments, model=constants, arithmetic=arithmetic).as_data()


def refusal(who: str, agreed: Mapping[str, Any], held: Mapping[str, Any]) -> str:
    """Says that `who` holds another contract than the run, with the fields that differ side by side.

    Empty when the two are the same.
    """
    if digest_of(agreed) == digest_of(held):
        return ""
    fields = differences(agreed, held)
    lines = [f"  {name}: {' | '.join(_around(left, right))}" for name, left, right in fields[:SHOWN]]
    if len(fields) > SHOWN:
        lines.append(f"  and {len(fields) - SHOWN} more fields")
    return "\n".join(
        [
            f"{who} holds run contract {digest_of(held)[:12]}, the run is under {digest_of(agreed)[:12]}: "
            "every process must run the same samebits version on the same model (the run | this process):",
            *lines,
        ]
    )


def _around(left: object, right: object) -> tuple[str, str]:
    """Both values as text, long ones cut to what surrounds their first difference."""
    a, b = ("none" if value is None else repr(value) for value in (left, right))
    first = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = max(0, first - WIDTH // 3) if max(len(a), len(b)) > WIDTH else 0
    return _cut(a, start), _cut(b, start)


def _cut(text: str, start: int) -> str:
    kept = text[start : start + WIDTH]
    return f"{'…' if start else ''}{kept}{'…' if start + WIDTH < len(text) else ''}"
