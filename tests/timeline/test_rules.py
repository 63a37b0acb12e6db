"""The rules of a timeline: every prefix of a good one is good, and every single edit of it is caught."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.timeline.events import (
    SCHEMA,
    Compared,
    Evaluated,
    Event,
    Measured,
    Published,
    RunFinished,
    RunStarted,
    Sampled,
    Timed,
    Trained,
)
from samebits.timeline.rules import check


def published(version: int) -> Published:
    return Published(version=version, digest=f"w{version}", contract="c", parameters=3, engines=1, seconds=0.1)


def sampled(step: int, sample: int) -> Sampled:
    return Sampled(
        step=step,
        prompt=7,
        sample=sample,
        engine=0,
        start=5 * sample,
        prompt_length=2,
        response_length=3,
        version=step - 1,
        digest=f"w{step - 1}",
        contract="c",
        finish_reason="stop",
        reward=1.0,
        advantage=0.0,
    )


def timeline(steps: int = 2, samples: int = 2) -> list[Event]:
    """A good timeline, with an evaluation at both ends."""
    lines: list[Event] = [
        RunStarted(
            schema=SCHEMA,
            contract="c",
            case={"logp": "R/R"},
            steps=steps,
            samples_per_step=samples,
            rollout_engines=1,
            trainer_ranks=1,
        ),
        published(0),
        Evaluated(step=0, version=0, samples=4, accuracy=0.5, mean_response_length=3.0, seconds=0.1),
    ]
    for step in range(1, steps + 1):
        lines += [sampled(step, sample) for sample in range(samples)]
        trained = {"loss": 0.1, "policy_loss": 0.1, "kl": 0.0, "grad_norm": 1.0, "clip_fraction": 0.0}
        lines.append(Trained(step=step, version=step - 1, tokens=3 * samples, ratio_mean=1.0, seconds={}, **trained))
        lines.append(
            Compared(
                step=step,
                version=step - 1,
                sidecar=f"steps/step_{step:05d}.safetensors",
                sidecar_sha256="0",
                compared_tokens=3 * samples,
                mismatch_count=0,
                nonfinite_count=0,
                max_abs_diff=0.0,
                mean_abs_diff=0.0,
                worst=None,
            )
        )
        lines.append(Measured(step=step, version=step - 1, tokens=3 * samples, metrics={"kl_k1": 0.0}))
        lines.append(published(step))
        lines.append(Timed(step=step, generated_tokens=3 * samples, seconds={"generate": 0.1}))
    lines.append(Evaluated(step=steps, version=steps, samples=4, accuracy=0.5, mean_response_length=3.0, seconds=0.1))
    lines.append(RunFinished(steps=steps))
    return lines


@given(steps=st.integers(1, 4), samples=st.integers(1, 4))
def test_a_good_timeline_and_each_of_its_prefixes_break_no_rule(steps: int, samples: int) -> None:
    lines = timeline(steps, samples)
    assert check(lines) == []
    for length in range(len(lines)):
        assert check(lines[:length], finished=False) == []
        assert check(lines[:length]) != []


@settings(max_examples=200)
@given(data=st.data())
def test_a_line_deleted_or_repeated_is_caught(data: st.DataObject) -> None:
    lines = timeline(3, 2)
    optional = [index for index, line in enumerate(lines) if isinstance(line, Evaluated)]
    index = data.draw(st.integers(0, len(lines) - 1).filter(lambda at: at not in optional))
    edited = lines[:index] + lines[index + 1 :]
    if data.draw(st.booleans()):
        edited = lines[: index + 1] + lines[index:]
    assert check(edited) != []


@settings(max_examples=200)
@given(data=st.data())
def test_two_lines_swapped_are_caught(data: st.DataObject) -> None:
    lines = timeline(3, 2)
    first, second = sorted(data.draw(st.sets(st.integers(0, len(lines) - 1), min_size=2, max_size=2)))
    lines[first], lines[second] = lines[second], lines[first]
    assert check(lines) != []


EDITS = [
    ("sampled", {"version": 0}, "live is 1"),
    ("sampled", {"digest": "other"}, "live is 1"),
    ("sampled", {"contract": "d"}, "another run contract"),
    ("sampled", {"start": 1}, "span starts"),
    ("sampled", {"response_length": 0}, "no part empty"),
    ("sampled", {"prompt_length": 0}, "no part empty"),
    ("sampled", {"engine": 1}, "names engine 1 of 1"),
    ("sampled", {"step": 1}, "want step 2"),
    ("trained", {"version": 0}, "with version 0"),
    ("compared", {"compared_tokens": 5}, "5 tokens compared, 6"),
    ("compared", {"step": 3}, "step 3"),
    ("published", {"version": 3}, "version 3 where version 2"),
    ("published", {"contract": "d"}, "changed during the run"),
    ("published", {"engines": 0}, "0 of 1 rollout engines"),
    ("published", {"parameters": 0}, "no parameter"),
    ("timed", {"generated_tokens": 7}, "7 tokens generated"),
    ("timed", {"seconds": {"train": -1.0}}, "negative time"),
    ("evaluated", {"version": 1}, "after step 2 with version 1"),
    ("run_finished", {"steps": 3}, "says 3 steps"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), EDITS, ids=lambda value: str(value)[:40])
def test_one_edited_field_of_the_last_step_is_caught(kind: str, fields: dict, message: str) -> None:
    lines = timeline(2, 2)
    index = max(at for at, line in enumerate(lines) if line.kind == kind)
    lines[index] = dataclasses.replace(lines[index], **fields)
    problems = check(lines)
    assert len(problems) == 1
    assert problems[0].startswith(f"line {index + 1}: {kind}: ")
    assert message in problems[0]


def test_the_same_sample_twice_is_caught() -> None:
    lines = timeline(1, 2)
    lines[4] = dataclasses.replace(lines[3], start=5)
    assert "appears twice" in check(lines)[0]
