"""What must hold between the lines of a timeline. Pure: events in, a list of sentences out.

    run_started
    published v0 [evaluated]
    for each step s = 1, 2, ...:  sampled x N, trained, compared, measured, published v(s), timed, [evaluated]
    run_finished

A sample carries the version that is live when its step begins, training and comparison use the same one,
and spans tile the step's sidecar in order.
"""

from __future__ import annotations

from collections.abc import Iterable

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


def check(events: Iterable[Event], *, finished: bool = True) -> list[str]:
    """The first broken rule as a list of one sentence, or an empty list.

    With `finished` the timeline must also end in run_finished after all promised steps; without it, any
    prefix of a good timeline is good.
    """
    state = _State()
    number = 0
    for number, event in enumerate(events, start=1):
        problem = state.take(event)
        if problem:
            return [f"line {number}: {event.kind}: {problem}"]
    if finished and not state.finished:
        return [f"line {number + 1}: the timeline stops before run_finished (after step {state.step})"]
    return []


class _State:
    """Where the timeline stands: what may come next, and which version is live."""

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.finished = False
        self.live: Published | None = None
        self.step = 0
        self.keys: set[str] = set()
        self.next_start = 0
        self.response_tokens = self.finite_tokens = 0
        self.trained: Trained | None = None
        self.expect: tuple[type[Event], ...] = (RunStarted,)

    def take(self, event: Event) -> str | None:
        if not isinstance(event, self.expect):
            wanted = " or ".join(kind.kind for kind in self.expect) or "nothing more"
            return f"want {wanted} here"
        match event:
            case RunStarted():
                return self._start(event)
            case Published():
                return self._publish(event)
            case Sampled():
                return self._sample(event)
            case Trained():
                return self._train(event)
            case Compared():
                return self._compare(event)
            case Measured():
                return self._measure(event)
            case Timed():
                return self._time(event)
            case Evaluated():
                return self._evaluate(event)
            case RunFinished():
                return self._finish(event)

    def _start(self, event: RunStarted) -> str | None:
        self.started = event
        self.expect = (Published,)
        if event.schema != SCHEMA:
            return f"schema is {event.schema!r}, this reader knows {SCHEMA!r}"
        for name in ("steps", "samples_per_step", "rollout_engines", "trainer_ranks"):
            if getattr(event, name) < 1:
                return f"{name} is {getattr(event, name)}, want at least 1"
        return None

    def _publish(self, event: Published) -> str | None:
        assert self.started is not None
        wanted = 0 if self.live is None else self.live.version + 1
        if event.version != wanted:
            return f"version {event.version} where version {wanted} must come next"
        if event.version != self.step:
            return f"version {event.version} after step {self.step}: want version {self.step}"
        if event.contract != self.started.contract:
            return "the run contract's digest changed during the run"
        if event.engines != self.started.rollout_engines:
            return f"{event.engines} of {self.started.rollout_engines} rollout engines acknowledged"
        if event.parameters < 1:
            return "no parameter was published"
        if self.live is not None and event.parameters != self.live.parameters:
            return f"{event.parameters} parameters were published, before that {self.live.parameters}"
        if event.seconds < 0:
            return "it took negative time"
        self.live = event
        self.expect = (Timed,) if self.step else (Evaluated, *self._next_step())
        return None

    def _next_step(self) -> tuple[type[Event], ...]:
        assert self.started is not None
        self.keys = set()
        self.next_start = self.response_tokens = 0
        return (Sampled,) if self.step < self.started.steps else (RunFinished,)

    def _sample(self, event: Sampled) -> str | None:
        assert self.started is not None
        assert self.live is not None
        if event.step != self.step + 1:
            return f"sample of step {event.step}, want step {self.step + 1}"
        if event.key in self.keys:
            return f"sample {event.key} appears twice"
        if (event.version, event.digest) != (self.live.version, self.live.digest):
            return (
                f"sample {event.key} carries version {event.version}:{event.digest[:12]}, live is "
                f"{self.live.version}:{self.live.digest[:12]}"
            )
        strict = any(case.endswith("/R") for case in self.started.case.values())
        if event.contract != (self.started.contract if strict else ""):
            return f"sample {event.key} was made under another run contract"
        if event.start != self.next_start or event.prompt_length < 1 or event.response_length < 1:
            return f"sample {event.key}: span starts at {event.start}, want {self.next_start} and no part empty"
        if not 0 <= event.engine < self.started.rollout_engines:
            return f"sample {event.key} names engine {event.engine} of {self.started.rollout_engines}"
        self.keys.add(event.key)
        self.next_start += event.prompt_length + event.response_length
        self.response_tokens += event.response_length
        self.expect = (Sampled,) if len(self.keys) < self.started.samples_per_step else (Trained,)
        return None

    def _train(self, event: Trained) -> str | None:
        self.expect = (Compared,)
        self.trained = event
        if event.tokens != self.response_tokens:
            return f"trained on {event.tokens} tokens, {self.response_tokens} response tokens sampled"
        if event.grad_norm < 0 or not 0 <= event.clip_fraction <= 1:
            return f"grad_norm is {event.grad_norm} and clip_fraction {event.clip_fraction}: no such values exist"
        if any(seconds < 0 for seconds in event.seconds.values()):
            return "a phase took negative time"
        return self._same_step(event.step, event.version)

    def _compare(self, event: Compared) -> str | None:
        self.expect = (Measured,)
        if event.compared_tokens != self.response_tokens:
            return f"{event.compared_tokens} tokens compared, {self.response_tokens} response tokens sampled"
        self.finite_tokens = event.compared_tokens - event.nonfinite_count
        assert self.trained is not None
        ratio, clipped = self.trained.ratio_mean, self.trained.clip_fraction
        if not event.mismatch_count and not event.nonfinite_count and (ratio, clipped) != (1.0, 0.0):
            return f"no token differs, but the trainer's ratio_mean is {ratio} and its clip_fraction {clipped}"
        return self._same_step(event.step, event.version)

    def _measure(self, event: Measured) -> str | None:
        self.expect = (Published,)
        if event.tokens != self.finite_tokens:
            return f"{event.tokens} tokens measured, {self.finite_tokens} compared ones are finite"
        problem = self._same_step(event.step, event.version)
        self.step += 1
        return problem

    def _same_step(self, step: int, version: int) -> str | None:
        assert self.live is not None
        if (step, version) != (self.step + 1, self.live.version):
            return f"step {step} with version {version}, want step {self.step + 1} with version {self.live.version}"
        return None

    def _time(self, event: Timed) -> str | None:
        generated = self.response_tokens
        self.expect = (Evaluated, *self._next_step())
        if event.step != self.step:
            return f"times of step {event.step}, want step {self.step}"
        if event.generated_tokens != generated:
            return f"{event.generated_tokens} tokens generated, {generated} sampled"
        if any(seconds < 0 for seconds in event.seconds.values()):
            return "a phase took negative time"
        assert self.trained is not None
        assert self.live is not None
        inside = {"train": max(self.trained.seconds.values(), default=0.0), "publish": self.live.seconds}
        for phase, seconds in inside.items():
            if event.seconds.get(phase, seconds) < seconds:
                return f"{phase} took {event.seconds[phase]} s, a part of it {seconds} s"
        return None

    def _evaluate(self, event: Evaluated) -> str | None:
        assert self.live is not None
        self.expect = self._next_step()
        if event.samples < 1 or not 0 <= event.accuracy <= 1 or event.seconds < 0:
            return f"accuracy {event.accuracy} of {event.samples} samples in {event.seconds} s: no such values exist"
        if round(event.accuracy * event.samples) / event.samples != event.accuracy:
            return f"accuracy {event.accuracy} is no share of {event.samples} samples"
        if (event.step, event.version) != (self.step, self.live.version):
            return f"after step {event.step} with version {event.version}, want {self.step} and {self.live.version}"
        return None

    def _finish(self, event: RunFinished) -> str | None:
        self.expect = ()
        self.finished = True
        if event.steps != self.step:
            return f"says {event.steps} steps, the timeline holds {self.step}"
        return None
