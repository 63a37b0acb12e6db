"""The lines of timeline.jsonl: one frozen dataclass per kind, and its JSON form.

A line is an object {"seq", "time", "kind", ...fields}. Fields are exactly those of the dataclass: a missing,
unknown or wrongly typed one is an error, so a renamed field needs a new schema version.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

SCHEMA = "samebits.timeline/2"


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """First line of every run: what is promised, for which case, over how many parts."""

    kind: ClassVar[str] = "run_started"
    schema: str
    contract: str
    case: dict[str, str]
    steps: int
    samples_per_step: int
    rollout_engines: int
    trainer_ranks: int


@dataclass(frozen=True, kw_only=True)
class Published:
    """Weights `version` are live in every rollout engine, and every parameter's digest agreed."""

    kind: ClassVar[str] = "published"
    version: int
    digest: str
    contract: str
    parameters: int
    engines: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One response: tokens [start, start + prompt_length + response_length) of the step's sidecar."""

    kind: ClassVar[str] = "sampled"
    step: int
    prompt: int
    sample: int
    engine: int
    start: int
    prompt_length: int
    response_length: int
    version: int
    digest: str
    contract: str
    finish_reason: str
    reward: float
    advantage: float

    @property
    def key(self) -> str:
        return f"{self.step}/{self.prompt}/{self.sample}"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One optimiser step on the samples of this step with weights `version`; `seconds` by the trainer's clock."""

    kind: ClassVar[str] = "trained"
    step: int
    version: int
    loss: float
    policy_loss: float
    kl: float
    grad_norm: float
    clip_fraction: float
    ratio_mean: float
    tokens: int
    seconds: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The step's comparison over all active tokens. `worst` names one: step/prompt/sample@position."""

    kind: ClassVar[str] = "compared"
    step: int
    version: int
    sidecar: str
    sidecar_sha256: str
    compared_tokens: int
    mismatch_count: int
    nonfinite_count: int
    max_abs_diff: float
    mean_abs_diff: float
    worst: str | None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How far the two policies are apart over the `tokens` of this step with finite values; nothing over none."""

    kind: ClassVar[str] = "measured"
    step: int
    version: int
    tokens: int
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Where the seconds of one step went, by phase."""

    kind: ClassVar[str] = "timed"
    step: int
    generated_tokens: int
    seconds: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Accuracy on the held-out split with weights `version`, after `step` training steps."""

    kind: ClassVar[str] = "evaluated"
    step: int
    version: int
    samples: int
    accuracy: float
    mean_response_length: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RunFinished:
    """Last line of a run that came to its end."""

    kind: ClassVar[str] = "run_finished"
    steps: int


Event = RunStarted | Published | Sampled | Trained | Compared | Measured | Timed | Evaluated | RunFinished

KINDS: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (RunStarted, Published, Sampled, Trained, Compared, Measured, Timed, Evaluated, RunFinished)
}
_HINTS = {kind: {f.name: get_type_hints(cls)[f.name] for f in dataclasses.fields(cls)} for kind, cls in KINDS.items()}


def to_line(event: Event, seq: int, time: float) -> str:
    """One JSON line without its newline. Raises ValueError for a float that is not finite."""
    record = {"seq": seq, "time": round(time, 3), "kind": event.kind} | dataclasses.asdict(event)
    return json.dumps(record, allow_nan=False, separators=(",", ":"))


def from_line(line: str) -> tuple[int, float, Event]:
    """The inverse of `to_line`: (seq, time, event). ValueError says what is wrong with the line."""
    record = parse_json(line)
    if not isinstance(record, dict):
        raise ValueError(f"want a JSON object, got {type(record).__name__}")
    kind = record.pop("kind", None)
    seq, time = record.pop("seq", None), record.pop("time", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(KINDS)}")
    if not _matches(seq, int) or not _matches(time, float):
        raise ValueError(f"{kind}: seq must be an integer and time a number, got {seq!r} and {time!r}")
    hints = _HINTS[kind]
    if set(record) != set(hints):
        missing, extra = sorted(set(hints) - set(record)), sorted(set(record) - set(hints))
        raise ValueError(f"{kind}: missing fields {missing}, unknown fields {extra}")
    for name, value in record.items():
        if not _matches(value, hints[name]):
            raise ValueError(f"{kind}.{name}: want {hints[name]}, got {value!r}")
    return seq, time, KINDS[kind](**record)


def parse_json(text: str | bytes) -> Any:
    """Strict JSON: no NaN or Infinity, no number beyond float64, no duplicate keys. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if abs(value) == float("inf"):
        raise ValueError(f"{text} is beyond float64")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {next(name for name in names if names.count(name) > 1)!r}")
    return record


def _matches(value: object, hint: Any) -> bool:
    if get_origin(hint) is dict:
        key_type, value_type = get_args(hint)
        return isinstance(value, Mapping) and all(
            isinstance(k, key_type) and _matches(v, value_type) for k, v in value.items()
        )
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 1 << 63
    if hint is float:
        return _matches(value, int) or (isinstance(value, float) and abs(value) < float("inf"))
    if hint is str:
        return isinstance(value, str)
    return any(value is None if option is NoneType else _matches(value, option) for option in get_args(hint))
