"""Recording, while a step is computed, what every boundary wrote for a few of its tokens, on both sides."""

from __future__ import annotations

from collections.abc import Sequence

from samebits.evidence.record import Recorder
from samebits.evidence.store import TRACES
from samebits.rl.protocols import RolloutSide, TrainerSide
from samebits.timeline.types import GenerateRequest
from samebits.trace import assemble
from samebits.trace.files import encode_traces

TRACED_SAMPLE = 0  # the first of the step: it also computes its own prompt instead of finding it cached


def trace_name(step: int) -> str:
    """The path of a step's traces inside its run directory."""
    return f"{TRACES}/step_{step:05d}.safetensors"


def watch(rollout: RolloutSide, trainer: TrainerSide, requests: Sequence[GenerateRequest], tokens: int) -> None:
    """Both sides record the prompt and the first `tokens` response tokens of the first request, until `keep`."""
    last = len(requests[TRACED_SAMPLE].prompt_ids) + tokens - 2  # the row of a token predicts the next one
    for side in (rollout, trainer):
        side.watch({TRACED_SAMPLE: last})


def keep(rollout: RolloutSide, trainer: TrainerSide, record: Recorder, step: int) -> None:
    """Stops recording and writes the step's traces. Raises OSError."""
    sides = {"trainer": assemble(trainer.watched()), "rollout": assemble(rollout.watched())}
    (record.run.path / TRACES).mkdir(exist_ok=True)
    record.run.write(trace_name(step), encode_traces(sides))
