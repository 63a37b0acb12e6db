"""summary.json as a function of the timeline, so that a verifier computes the same. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from samebits.evidence.drift import merged
from samebits.evidence.speed import speed
from samebits.evidence.verdict import judge
from samebits.timeline.events import Compared, Evaluated, Event, Measured, RunStarted, Sampled, Timed

SCHEMA = "samebits.summary/2"


def summarise(events: Iterable[Event]) -> dict[str, Any]:
    """Totals of a run. All floats are finite; a rate over nothing is 0.0, an accuracy not measured None."""
    events = tuple(events)
    started = next((event for event in events if isinstance(event, RunStarted)), None)
    compared = [event for event in events if isinstance(event, Compared)]
    timed = [event for event in events if isinstance(event, Timed)]
    all_steps = speed(timed, warm_up=0)
    rewards = [event.reward for event in events if isinstance(event, Sampled)]
    accuracy = [event.accuracy for event in events if isinstance(event, Evaluated)]
    tokens = sum(event.compared_tokens for event in compared)
    mismatches = sum(event.mismatch_count for event in compared)
    nonfinite = sum(event.nonfinite_count for event in compared)
    finite = sum(event.compared_tokens - event.nonfinite_count for event in compared)
    differences = math.fsum(event.mean_abs_diff * (event.compared_tokens - event.nonfinite_count) for event in compared)
    return {
        "schema": SCHEMA,
        "verdict": judge(tokens, mismatches, nonfinite).value,
        "case": case_name(started.case) if started else "",
        "modules": dict(started.case) if started else {},
        "steps": len(compared),
        "compared_tokens": tokens,
        "mismatch_count": mismatches,
        "steps_with_mismatch": sum(event.mismatch_count > 0 for event in compared),
        "nonfinite_count": nonfinite,
        "max_abs_diff": max((event.max_abs_diff for event in compared), default=0.0),
        "mean_abs_diff": differences / max(finite, 1),
        "worst": _worst(compared),
        "drift": merged((event.tokens, event.metrics) for event in events if isinstance(event, Measured)),
        "generated_tokens": sum(event.generated_tokens for event in timed),
        "tokens_per_second": all_steps.tokens_per_second,
        "seconds_per_step": all_steps.seconds_per_step,
        "seconds_by_phase": _phases(timed),
        "mean_reward": math.fsum(rewards) / max(len(rewards), 1),
        "first_accuracy": accuracy[0] if accuracy else None,
        "last_accuracy": accuracy[-1] if accuracy else None,
    }


def case_name(modules: dict[str, str]) -> str:
    """R/R when all modules share one case, else each module's: attention=R/R ffn=P/P logp=R/R."""
    cases = set(modules.values())
    if len(cases) == 1:
        return cases.pop()
    return " ".join(f"{module}={case}" for module, case in modules.items())


def _worst(compared: list[Compared]) -> str | None:
    differing = [event for event in compared if event.mismatch_count > 0]
    return max(differing, key=lambda event: event.max_abs_diff).worst if differing else None


def _phases(timed: list[Timed]) -> dict[str, float]:
    names = dict.fromkeys(name for event in timed for name in event.seconds)
    return {name: math.fsum(event.seconds.get(name, 0.0) for event in timed) for name in names}
