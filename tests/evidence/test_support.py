"""Supports on record: every sampled token must lie in its own, under the limits that the settings declare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from samebits.evidence.encode import encode_step
from samebits.evidence.record import Recorder
from samebits.evidence.sidecar import StepSample, read_step
from samebits.evidence.verdict import Verdict
from samebits.evidence.verify import describe, verify
from samebits.testing import runs
from samebits.testing.runs import write_run
from samebits.timeline.types import Support

GOOD = Support.of([[1, 5], [7], [0, 2, 9]])


def sample(support: Support | None, key: str = "1/0/0") -> StepSample:
    return StepSample(
        key=key, prompt_ids=(3, 4), token_ids=(5, 7, 0), rollout_bits=(1, 2, 3), trainer_bits=(1, 2, 3),
        versions=(0, 0, 0), reward=1.0, advantage=0.5, support=support,
    )  # fmt: skip


def test_a_sidecar_holds_supports(tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"
    path.write_bytes(encode_step([sample(GOOD), sample(Support.of([[5], [0, 7], [0]]), "1/0/1")]))
    first, second = read_step(path)
    assert first.support == GOOD
    assert second.support == Support.of([[5], [0, 7], [0]])
    path.write_bytes(encode_step([sample(None)]))
    assert read_step(path)[0].support is None
    with pytest.raises(ValueError, match="1 of 2 samples have supports"):
        encode_step([sample(GOOD), sample(None, "1/0/1")])


@pytest.mark.parametrize(
    ("support", "problem"),
    [
        (GOOD, ""),
        (Support.of([[1, 5], [], [0]]), ""),
        (Support.of([[1, 5], [8], [0]]), "token 7 at 1 is not in its support of 1 ids"),
        (Support.of([[5, 1], [7], [0]]), "the support at 0 is not a list of ascending ids"),
        (Support.of([[5], [7, 7], [0]]), "the support at 1 is not"),
        (Support.of([[-1, 5], [7], [0]]), "the support at 0 is not"),
        (Support.of([[5], [7]]), "2 supports for 3 tokens"),
        (Support(GOOD.counts, GOOD.ids[1:]), "supports of 6 ids in all, but 5 are given"),
    ],
)
def test_what_is_wrong_with_a_support_is_said(support: Support, problem: str) -> None:
    found = support.problem((5, 7, 0))
    assert found.startswith(problem)
    assert bool(found) == bool(problem)


def test_a_run_under_limits_verifies_and_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "run", top_k=3)
    found = verify(tmp_path / "run")
    assert (found.verdict, found.problems) == (Verdict.SAME, ())
    assert found.sampling == "top-k 3; all 36 tokens lie in their recorded supports, 3.0 ids on average"
    assert f"sampling: {found.sampling}" in describe(found)
    write_run(tmp_path / "free")
    assert verify(tmp_path / "free").sampling == ""


def change_first(change: Callable[[Support], Support | None]) -> Callable[[Sequence[StepSample]], list[StepSample]]:
    def changed(samples: Sequence[StepSample]) -> list[StepSample]:
        first, *others = samples
        assert first.support is not None
        return [StepSample(**{**vars(first), "support": change(first.support)}), *others]

    return changed


TAMPERED: dict[str, tuple[Callable[[Sequence[StepSample]], list[StepSample]], str]] = {
    "token outside": (
        change_first(lambda s: Support.of([[i + 1 for i in ids] for ids in s.rows()])),
        "steps/step_00001.safetensors: sample 1/0/0: token 10 at 0 is not in its support of 3 ids",
    ),
    "more than k": (
        change_first(lambda s: Support.of([[*ids, 90] for ids in s.rows()])),
        "sample 1/0/0: supports of 4 to 4 ids, the settings allow 1 to 3",
    ),
    "nothing recorded for a token": (
        change_first(lambda s: Support.of([[], *list(s.rows())[1:]])),
        "supports of 0 to 3 ids",
    ),
    "nothing recorded": (
        lambda samples: [StepSample(**{**vars(one), "support": None}) for one in samples],
        "no support is recorded, though the settings limit the draws",
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_run_whose_supports_do_not_fit_cannot_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The recorder itself is given other supports, so that every digest fits."""
    tamper, message = TAMPERED[name]
    compared = Recorder.compared

    def tampered(self: Recorder, step: int, version: int, samples: Sequence[StepSample], *rest: Any) -> Any:
        return compared(self, step, version, tamper(samples), *rest)

    monkeypatch.setattr(Recorder, "compared", tampered)
    write_run(tmp_path / "run", top_k=3)
    found = verify(tmp_path / "run")
    assert found.verdict is Verdict.CANNOT_TELL
    assert message in found.problems[0]


def test_supports_that_no_setting_explains_are_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runs._manifest
    monkeypatch.setattr(runs, "_manifest", lambda case, steps, top_k: made(case, steps, 0))
    write_run(tmp_path / "run", top_k=3)
    assert "supports are recorded, though the settings limit nothing" in verify(tmp_path / "run").problems[0]
