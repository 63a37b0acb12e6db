"""Groups of processes behind the loop's two Protocols: how requests are shared and answers brought together."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from samebits.rl.protocols import RunFailed
from samebits.rl.sides import RolloutGroup, TrainerGroup, merge_results
from samebits.timeline.types import GenerateRequest, Rollout, SampleKey, StepResult, WeightVersion


@dataclass
class FakeHost:
    number: int
    answers: dict[str, Any] = field(default_factory=dict)
    asked: list[GenerateRequest] = field(default_factory=list)

    def call(self, method: str, *args: Any) -> Future:
        future: Future = Future()
        if method == "generate":
            self.asked = list(args[0])
            future.set_result([rollout(request.key, self.number) for request in reversed(self.asked)])
        else:
            future.set_result(self.answers[method])
        return future


@dataclass
class FakeGroup:
    hosts: list[FakeHost]

    def gather(self, doing: str, pending: list[Future], timeout: float) -> list[Any]:
        return [future.result() for future in pending]

    def everyone(self, method: str, *args: Any, timeout: float) -> list[Any]:
        return self.gather(method, [host.call(method, *args) for host in self.hosts], timeout)


def rollout(key: SampleKey, engine: int) -> Rollout:
    return Rollout(key, (1,), (2,), (3,), WeightVersion(0, "w"), "c", "stop", engine)


def request(prompt: int, sample: int) -> GenerateRequest:
    return GenerateRequest(SampleKey(1, prompt, sample), (1,), 0, 4, 1.0, ())


@pytest.mark.parametrize(
    ("prompts", "samples", "engines"),
    [
        ((9, 4), 3, [0, 0, 0, 1, 1, 1]),  # a prompt's responses stay on one engine
        ((9, 4, 7), 2, [0, 0, 0, 1, 1, 1]),
        ((9,), 5, [0, 0, 0, 1, 1]),
        ((9,), 1, [0]),
    ],
)
def test_engines_share_the_requests_evenly_and_answers_keep_their_order(
    prompts: tuple[int, ...], samples: int, engines: list[int]
) -> None:
    group = FakeGroup([FakeHost(0), FakeHost(1)])
    requests = [request(prompt, sample) for prompt in prompts for sample in range(samples)]
    found = RolloutGroup(group, 1.0).generate(requests)  # type: ignore[arg-type]
    assert [answer.key for answer in found] == [r.key for r in requests]
    assert [answer.engine for answer in found] == engines


def test_a_sample_that_comes_twice_is_an_error() -> None:
    group = FakeGroup([FakeHost(0)])
    with pytest.raises(RunFailed, match="sample 1/0/0 came back twice"):
        RolloutGroup(group, 1.0).generate([request(0, 0), request(0, 0)])  # type: ignore[arg-type]


def test_a_sample_that_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FakeGroup([FakeHost(0)])
    real = group.gather
    monkeypatch.setattr(group, "gather", lambda *args: [answers[1:] for answers in real(*args)])
    with pytest.raises(RunFailed, match=r"returned 1 samples for 2 requests; missing: 1/0/1"):
        RolloutGroup(group, 1.0).generate([request(0, 0), request(0, 1)])  # type: ignore[arg-type]


def result(bits: dict[int, tuple[int, ...]], loss: float = 1.0) -> StepResult:
    keyed = {SampleKey(1, prompt, 0): values for prompt, values in bits.items()}
    return StepResult(1, keyed, loss, loss, 0.0, 1.0, 0.0, 1.0, 3)


def test_ranks_may_hold_different_samples_but_never_different_bits() -> None:
    merged = merge_results([result({0: (1, 2)}), result({0: (1, 2), 1: (3,)}, loss=9.0)])
    assert merged == result({0: (1, 2), 1: (3,)})
    with pytest.raises(RunFailed, match="trainer rank 1 computed other log-probabilities for sample 1/0/0"):
        merge_results([result({0: (1, 2)}), result({0: (1, 3)})])


@pytest.mark.parametrize("answers", [[{}, {}], [{"w": "a"}, {"w": "b"}]])
def test_ranks_must_agree_about_the_export(answers: list[dict[str, str]]) -> None:
    group = FakeGroup([FakeHost(at, {"export": found}) for at, found in enumerate(answers)])
    with pytest.raises(RunFailed, match="disagree about the digests"):
        TrainerGroup(group, 1.0).export("x")  # type: ignore[arg-type]


def test_ranks_without_a_whole_copy_say_nothing() -> None:
    group = FakeGroup([FakeHost(0, {"export": {"w": "a"}}), FakeHost(1, {"export": {}})])
    assert TrainerGroup(group, 1.0).export("x") == {"w": "a"}  # type: ignore[arg-type]
