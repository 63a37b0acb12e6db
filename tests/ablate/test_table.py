"""The table comes from the arms' records alone: it is never vacuous, and a wrong one is caught."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import samebits
from samebits.ablate.check import is_ablation, verify_ablation
from samebits.ablate.table import ABLATION, as_markdown, collect
from samebits.evidence.verdict import Verdict
from samebits.testing.runs import CLIP, CONTRACT, write_run

PLAN = {
    "arms": ["M000", "M111"],
    "views": ["free", "equal"],
    "tokens_of": "M111",
    "contract": CONTRACT.digest(),
    "packages": {"samebits": "0"},
    "inputs": {},
    "config": {"clip_ratio": CLIP, "native_compile": True},
}


def write(folder: Path) -> Path:
    """An ablation of two arms in both views, with one mismatch in each native arm."""
    for view in PLAN["views"]:
        write_run(folder / view / "M000", case="P/P", flips={(1, 2)})
        write_run(folder / view / "M111", case="R/R")
    return finish(folder)


def finish(folder: Path, plan: dict | None = None) -> Path:
    (folder / ABLATION).write_text(json.dumps(collect(folder, plan or PLAN, {})))
    return folder


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    table = json.loads((folder / ABLATION).read_text())
    change(table)
    (folder / ABLATION).write_text(json.dumps(table))


def row(table: dict, view: str, arm: str) -> dict:
    return next(row for row in table["views"][view] if row["arm"] == arm)


def test_the_numbers_are_those_of_the_arms(tmp_path: Path) -> None:
    found = verify_ablation(write(tmp_path))
    assert (found.verdict, found.problems) == (Verdict.SAME, ())
    native, strict = (row(found.table, "equal", arm) for arm in PLAN["arms"])
    assert (native["status"], native["mismatch_count"], native["compared_tokens"]) == ("different", 1, 36)
    assert 0 < native["mean_abs_diff"] < native["max_abs_diff"]
    assert (strict["status"], strict["mismatch_count"], strict["max_abs_diff"]) == ("same", 0, 0.0)
    assert strict["tokens_per_second"] == pytest.approx(18 / 0.5)
    assert strict["warm_up"] == 1


def test_an_arm_that_did_not_end_says_so_and_counts_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "free/M000/seal.json").unlink()
    found = verify_ablation(finish(tmp_path))
    assert found.verdict is Verdict.CANNOT_TELL
    assert found.problems == ("free M000: it did not come to its end",)
    gone = row(found.table, "free", "M000")
    assert {gone[key] for key in ("mismatch_count", "compared_tokens", "max_abs_diff", "tokens_per_second")} == {None}
    assert "| M000 | P/P | P/P | P/P | cannot tell | - | - | - | - | - |" in as_markdown(found.table)


def test_a_strict_arm_that_differs_is_a_finding(tmp_path: Path) -> None:
    for view in PLAN["views"]:
        write_run(tmp_path / view / "M000", case="P/P")
        write_run(tmp_path / view / "M111", case="R/R", flips={(2, 0)})
    assert verify_ablation(finish(tmp_path)).verdict is Verdict.DIFFERENT


def test_equal_work_needs_the_same_tokens(tmp_path: Path) -> None:
    """A run of another length has other tokens, so its arm can't stand in the equal-work view."""
    for view in PLAN["views"]:
        write_run(tmp_path / view / "M111", case="R/R")
        write_run(tmp_path / view / "M000", case="P/P", steps=3)
    table = verify_ablation(finish(tmp_path)).table
    assert row(table, "free", "M000")["status"] == "same"
    assert row(table, "equal", "M000")["status"] == "cannot tell"
    assert row(table, "equal", "M000")["problem"] == "its tokens are not the recorded ones"


def test_an_arm_in_the_wrong_folder_is_noticed(tmp_path: Path) -> None:
    for view in PLAN["views"]:
        for arm in PLAN["arms"]:
            write_run(tmp_path / view / arm, case="R/R")
    assert row(verify_ablation(finish(tmp_path)).table, "free", "M000")["problem"] == (
        "the run in its folder has other cases"
    )


WRONG = {
    "a better number": (lambda t: row(t, "free", "M000").update(mismatch_count=0), "mismatch_count is 0, the records"),
    "a faster arm": (lambda t: row(t, "equal", "M111").update(tokens_per_second=9e9), "tokens_per_second"),
    "another verdict": (lambda t: t.update(verdict="different"), "verdict is 'different'"),
    "an arm less": (lambda t: t["views"]["free"].pop(), "does not hold the plan's arms"),
    "another run's seal": (lambda t: row(t, "free", "M111").update(seal_sha256="0"), "seal_sha256"),
    "another schema": (lambda t: t.update(schema="x"), "schema is 'x'"),
    "no plan": (lambda t: t.pop("plan"), "plan"),
    "arms elsewhere": (lambda t: t["plan"].update(arms=["../M000", "M111"]), "no arm"),
    "views elsewhere": (lambda t: t["plan"].update(views=["../free"]), "unknown views"),
    "another contract": (lambda t: t["plan"].update(contract="0"), "its contract are not those of the plan"),
    "other settings": (lambda t: t["plan"]["config"].update(clip_ratio=0.1), "its config.clip_ratio is not that"),
    "no settings": (lambda t: t["plan"].pop("config"), "config"),
    "other packages": (lambda t: t["plan"].update(packages={}), "its packages are not those of the plan"),
    "no rows": (lambda t: t["views"].update(free=3), "ablation.json"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_table_is_caught(tmp_path: Path, name: str) -> None:
    change, message = WRONG[name]
    edit(write(tmp_path), change)
    found = verify_ablation(tmp_path)
    assert found.verdict is Verdict.CANNOT_TELL
    assert message in found.problems[0]


def test_an_ablation_that_was_killed_is_told_from_a_folder_without_one(tmp_path: Path) -> None:
    assert not is_ablation(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    assert is_ablation(tmp_path)
    found = verify_ablation(tmp_path)
    assert (found.verdict, "did not come to its end" in found.problems[0]) == (Verdict.CANNOT_TELL, True)


def test_verifying_needs_python_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path)
    code = "import sys; from pathlib import Path; from samebits.ablate import check\n"
    code += "print(check.describe(check.verify_ablation(Path(sys.argv[1]))))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(tmp_path)],
        cwd=Path(samebits.__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("verdict: same")
    assert "free M000: status different" in done.stdout
