"""How layouts are compared and shown: no token is passed over, and nothing is called the same that isn't."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from samebits.evidence.verdict import Verdict
from samebits.matrix.form_score import Scored
from samebits.matrix.form_train import as_reference
from samebits.matrix.plan import read_matrix
from samebits.matrix.record import HOW, grid, markdown, read_finished, write_finished
from samebits.matrix.runner import overall
from samebits.matrix.scores import Scores, compare_layouts, merge_ranks
from samebits.rl.protocols import RunFailed
from samebits.timeline.types import SampleKey, TrainSample

ONE = 0x3F800000
SAME = Scores(
    tokens={"1/0/0": [5, 6, 7], "1/0/1": [8]},
    bits={"1/0/0": [ONE, ONE + 1, ONE + 2], "1/0/1": [ONE + 3]},
    processes=1,
    seconds=0.0,
)


def other(**changes: Any) -> Scores:
    return dataclasses.replace(SAME, **changes)


def test_equal_scores_are_equal_and_have_one_name() -> None:
    found = compare_layouts(SAME, other(seconds=9.0, processes=4))
    assert (found.compared_tokens, found.mismatch_count) == (4, 0)
    assert other(seconds=9.0).digest() == SAME.digest()
    assert Scores.from_data(SAME.as_data()) == SAME


@pytest.mark.parametrize(
    ("changes", "mismatches"),
    [
        ({"bits": {"1/0/0": [ONE, ONE + 1, ONE + 2], "1/0/1": [ONE + 4]}}, 1),
        # another token: what follows it was said about another text
        ({"tokens": {"1/0/0": [5, 9, 7], "1/0/1": [8]}}, 2),
        ({"tokens": {"1/0/0": [5], "1/0/1": [8]}, "bits": {"1/0/0": [ONE], "1/0/1": [ONE + 3]}}, 2),
        ({"tokens": {"1/0/0": [5, 6, 7]}, "bits": {"1/0/0": [ONE, ONE + 1, ONE + 2]}}, 1),
    ],
)
def test_every_difference_is_counted(changes: dict[str, Any], mismatches: int) -> None:
    found = compare_layouts(SAME, other(**changes))
    assert (found.compared_tokens, found.mismatch_count) == (4, mismatches)
    assert other(**changes).digest() != SAME.digest()


def test_ranks_must_agree_and_answer_for_every_token() -> None:
    key = SampleKey(1, 0, 0)
    sample = TrainSample(key=key, token_ids=(1, 2, 3), prompt_length=1, advantage=0.0, rollout_logp_bits=(ONE, ONE))
    assert merge_ranks([{key: (1, 2)}, {key: (1, 2)}, {}], [sample]) == {"1/0/0": (1, 2)}
    with pytest.raises(ValueError, match="trainer rank 1 computed other log-probabilities for sample 1/0/0"):
        merge_ranks([{key: (1, 2)}, {key: (1, 3)}], [sample])
    with pytest.raises(ValueError, match="sample 1/0/0: the trainer scored 1 of 2 tokens"):
        merge_ranks([{key: (1,)}], [sample])


def pair(trainer: str, rollout: str, verdict: str = "same", **changes: Any) -> dict[str, Any]:
    return {
        "trainer": trainer,
        "rollout": rollout,
        "verdict": verdict,
        "compared_tokens": 1234,
        "mismatch_count": 0,
        "max_abs_diff": 0.0,
        "logp": "a" * 64,
        "logp_as_reference": True,
        "weights": "b" * 64,
        "weights_as_reference": True,
        **changes,
    }


@pytest.mark.parametrize(
    ("pairs", "same_weights", "verdict"),
    [
        ([pair("a", "b"), pair("c", "d")], True, Verdict.SAME),
        ([pair("a", "b"), pair("c", "d", "different", mismatch_count=1)], False, Verdict.DIFFERENT),
        ([pair("a", "b"), pair("c", "d", logp_as_reference=False)], False, Verdict.DIFFERENT),
        ([pair("a", "b"), pair("c", "d", weights_as_reference=False)], False, Verdict.SAME),
        ([pair("a", "b"), pair("c", "d", weights_as_reference=False)], True, Verdict.DIFFERENT),
        ([pair("a", "b"), pair("c", "d", "cannot tell")], False, Verdict.CANNOT_TELL),
        ([pair("a", "b", "different"), pair("c", "d", "cannot tell")], False, Verdict.DIFFERENT),
        ([], False, Verdict.CANNOT_TELL),
    ],
)
def test_one_bad_pair_is_enough(pairs: list[dict[str, Any]], same_weights: bool, verdict: Verdict) -> None:
    assert overall(pairs, same_weights) is verdict


def test_a_first_pair_that_can_not_tell_makes_no_other_one_different() -> None:
    pairs: list[dict[str, Any]] = [{"verdict": "cannot tell", "problem": "it fell over", "weights": ""}]
    for logp, weights in (("a", "b"), ("a", "b"), ("a", "c"), ("d", "b")):
        entry = {"verdict": "same", "logp": logp, "weights": weights}
        pairs.append({**entry, **as_reference(entry, pairs)})
    same = [(one["logp_as_reference"], one["weights_as_reference"]) for one in pairs[1:]]
    assert same == [(True, True), (True, True), (True, False), (False, True)]
    assert overall(pairs[:3], True) is Verdict.CANNOT_TELL
    assert overall(pairs, True) is Verdict.DIFFERENT


def test_weights_are_compared_without_the_first_trainer_layout_too(tmp_path: Path) -> None:
    file = tmp_path / "matrix.toml"
    file.write_text(
        "steps = 1\n[trainer.tp1]\n[trainer.cp2]\ntrain_cp = 2\n[trainer.dp2]\ntrain_dp = 2\n[rollout.tp1]\n"
    )
    nothing: Any = None
    scored = Scored(read_matrix(file, {}), tmp_path, nothing, "key", lambda line: None)

    def broken() -> Scores:
        raise RunFailed("it fell over")

    scored._attempt("rollout", "tp1", other)
    scored._attempt("trainer", "tp1", broken)
    for name, weights in (("cp2", "b"), ("dp2", "c")):
        scored._attempt("trainer", name, partial(other, steps=[{"weights": weights}]))
    assert [scored.pair(name, "tp1")["weights_as_reference"] for name in ("cp2", "dp2")] == [True, False]
    assert scored.pair("tp1", "tp1")["verdict"] == "cannot tell"


@pytest.mark.parametrize("text", ["{", "[1]", '{"key": "k"}', '{"key": "other", "content": {}}', ""])
def test_what_can_not_be_read_is_done_again(tmp_path: Path, text: str) -> None:
    file = tmp_path / "layouts" / "trainer-tp1.json"
    assert read_finished(file, "k") is None
    write_finished(file, "k", {"a": 1})
    assert read_finished(file, "k") == {"a": 1}
    file.write_text(text)
    assert read_finished(file, "k") is None


def test_the_pages_show_every_pair() -> None:
    steps = [{"loss": 0.25, "weights": "b" * 64}]
    record = {
        "form": "score",
        "how": HOW["score"],
        "verdict": "different",
        "contract": "c" * 64,
        "max_tp": 4,
        "steps": 1,
        "layouts": {
            "trainer tp1": {"processes": 1, "steps": steps},
            "trainer cp2": {"processes": 2, "steps": steps},
            "trainer pp2": {"problem": "it fell over"},
        },
        "pairs": [
            pair("tp1", "tp1"),
            pair("cp2", "tp1", "different", mismatch_count=7, logp_as_reference=False),
            pair("pp2", "tp1", "cannot tell", problem="trainer pp2: a | b\nit fell over", weights=""),
        ],
    }
    assert grid(record).splitlines() == [
        "| trainer \\ rollout | ranks | tp1 | loss of step 1 | weights after 1 steps |",
        "| --- | --- | --- | --- | --- |",
        "| tp1 | 1 | 0 of 1,234 | 0.25 | bbbbbbbbbbbb |",
        "| cp2 | 2 | 7 of 1,234, not as first | 0.25 | bbbbbbbbbbbb |",
        "| pp2 |  | cannot tell |  |  |",
    ]
    page = markdown(record)
    assert "3 pairs: **different**" in page
    assert "| cp2 | tp1 | different | 1,234 | 7 | 0 | aaaaaaaaaaaa | NO | bbbbbbbbbbbb | yes |" in page
    assert "| pp2 | tp1 | cannot tell |  |  |  | trainer pp2: a \\| b it fell over |  |  |  |" in page
