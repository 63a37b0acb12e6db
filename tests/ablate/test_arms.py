"""Arms and plans: every arm has one name, and every wrong word is named."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from samebits.ablate.arms import Arm, arms_of, case_arms, module_arms, parse_arm
from samebits.ablate.plan import Plan, make_plan, open_folder
from samebits.contract.routes import CASES


def test_every_arm_reads_back_from_its_name() -> None:
    arms = [Arm(cases) for cases in itertools.product(CASES, repeat=3)]
    assert len({arm.name for arm in arms}) == 64
    for arm in arms:
        assert parse_arm(arm.name) == arm
        assert not set(arm.name) & set("/\\ ")


def test_the_eight_arms() -> None:
    names = [arm.name for arm in module_arms()]
    assert names == ["M000", "M001", "M010", "M011", "M100", "M101", "M110", "M111"]
    assert parse_arm("m101").by_module() == {"attention": "R/R", "ffn": "P/P", "logp": "R/R"}
    assert [arm.is_strict for arm in module_arms()] == [False] * 7 + [True]


def test_the_cases_of_a_module_leave_the_others_strict() -> None:
    assert [arm.name for arm in case_arms("ffn")] == ["M101", "ffn=PR", "ffn=RP", "M111"]
    # each arm once, whichever way it was named
    assert len(arms_of([], ["ffn", "logp"])) == 8 + 4
    assert [arm.name for arm in arms_of(["M000", "ffn=P/R"], [])] == ["M000", "ffn=PR"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("M10", "no arm 'M10': want M and a 0 or 1"),
        ("M1012", "no arm 'M1012'"),
        ("atention=P/P", "did you mean 'attention'"),
        ("ffn", "want M101 or MODULE=CASE"),
        ("ffn=R", "no case"),
        ("ffn=R/R/R", "no case"),
        ("../ffn=R/R", "want M101"),
        ("ffn=P/R,logp=P/R,ffn=R/R", "ffn stands there more than once"),
    ],
)
def test_a_wrong_arm_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arm(text)


def plan_of(folder: Path, flags: dict[str, Any] | None = None, **more: Any) -> Plan:
    return make_plan(flags or {}, None, arms=more.pop("arms", module_arms()), folder=folder, **more)


def test_an_arm_runs_the_plan_with_its_own_cases(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"lr": 0.5, "native_compile": True})
    assert (plan.source.name, plan.views) == ("M111", ("free", "equal"))
    free, equal = (plan.config_of(view, parse_arm("M010")) for view in ("free", "equal"))
    assert free.cases == {"attention": "P/P", "ffn": "R/R", "logp": "P/P"}
    assert (free.lr, free.eval_interval, free.replay_tokens) == (0.5, 0, None)
    assert equal.replay_tokens == str(tmp_path / "free" / "M111")
    # the compiled mode is for engines that run nothing of ours
    assert [plan.config_of("free", parse_arm(name)).native_compile for name in ("M000", "M010")] == [True, False]
    assert plan_of(tmp_path, {"eval_interval": 5}).config_of("free", plan.source).eval_interval == 5


def test_a_job_file_may_hold_a_case(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('case = "R/P"\nffn_case = "P/P"\nlr = 0.25\n')
    plan = make_plan({}, tmp_path / "job.toml", arms=module_arms(), folder=tmp_path)
    assert plan.config_of("free", parse_arm("M111")).cases == dict.fromkeys(("attention", "ffn", "logp"), "R/R")
    assert plan.config.lr == 0.25


@pytest.mark.parametrize(
    ("flags", "more", "message"),
    [
        ({"case": "R/R"}, {}, "case: an ablation sets it for each arm"),
        ({"logp_case": "R/R"}, {}, "logp_case: an ablation sets it"),
        ({"replay_tokens": "x"}, {}, "replay_tokens: an ablation sets it"),
        ({"num_rolout": 3}, {}, "did you mean 'num_rollout'"),
        ({}, {"view": "both views"}, "view: want free, equal or both"),
        ({}, {"arms": [parse_arm("M000")], "source": parse_arm("M111")}, "M111 is no arm of this ablation: M000"),
        ({"linear_logp_provider_mode": "audit"}, {}, "audit keeps the native"),
    ],
)
def test_a_wrong_plan_is_named(tmp_path: Path, flags: dict, more: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(tmp_path, flags, **more)


def test_a_folder_holds_one_plan(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "x")
    data = {"schema": "s", "config": {"lr": 1.0, "seed": 3}, "arms": ["M000"]}
    assert open_folder(plan, data) is False
    assert open_folder(plan, data) is True
    with pytest.raises(ValueError, match=r"holds another ablation: config.lr was 1.0, now 2.0"):
        open_folder(plan, {**data, "config": {"lr": 2.0, "seed": 3}})
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match="exists and holds no ablation"):
        open_folder(plan_of(tmp_path / "y"), data)
    with pytest.raises(ValueError, match="exists and holds no ablation"):
        open_folder(plan_of(tmp_path / "y" / "thesis.txt"), data)
