"""The reward: what earns it, what does not, and that no response can break or stall it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.rl.given_reward import GivenReward
from samebits.rl.protocols import RunFailed
from samebits.rl.reward import LONGEST_ANSWER, Judge, last_boxed, reward


def test_a_function_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("def score(response, label):\n    return response.count(label) / 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    given = GivenReward.load("my_rewards.score")
    assert given("five 5, 5 and 5", "5") == 1.5
    digest = hashlib.sha256((tmp_path / "my_rewards.py").read_bytes()).hexdigest()
    assert given.record() == {"path": "my_rewards.score", "source": digest}
    assert GivenReward.load("operator.countOf").record() == {"path": "operator.countOf", "source": None}


def test_a_wrapped_function_is_called_as_its_wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrapped_rewards.py").write_text(
        "import functools\n"
        "def full(response, label, weight): return weight * (response == label)\n"
        "@functools.wraps(full)\n"
        "def score(response, label): return full(response, label, 2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert GivenReward.load("wrapped_rewards.score")("5", "5") == 2.0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def score(response): return 1.0", "must take a response and its label: too many positional arguments"),
        ("def score(response, label, step): return 1.0", "must take a response and its label: missing .* 'step'"),
        ("async def score(response, label): return 1.0", "must be a plain function"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    (tmp_path / "odd_rewards.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_rewards", raising=False)
    with pytest.raises(ValueError, match=f"reward 'odd_rewards.score' {message}"):
        GivenReward.load("odd_rewards.score")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda response, label: float("nan"), "got nan, want a finite number"),
        (lambda response, label: None, "got None, want a finite number"),
        (lambda response, label: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda response: 1.0, "TypeError"),
    ],
)
def test_what_it_does_wrong_is_named(function: Callable[..., object], message: str) -> None:
    with pytest.raises(RunFailed, match=f"reward my.score, label '56': .*{message}"):
        GivenReward("my.score", function)("text", "56")


@pytest.fixture
def judge() -> Iterator[Judge]:
    judge = Judge(seconds=60.0)
    yield judge
    judge.close()


@pytest.mark.parametrize(
    ("response", "label"),
    [
        (r"\boxed{56}", "56"),
        (r"47+38=85. 85-29=56. \boxed{56}", "56"),
        (r"\boxed{1} no, \boxed{56}", " 56 "),
        (r"\boxed{\boxed{56}}", "56"),
        (r"\boxed{ 056 }", "56"),
        (r"\boxed{-7}", "-7"),
        (r"\boxed{56.0}", "56"),
        (r"\boxed{\frac{112}{2}}", "56"),
        (r"\boxed{\dfrac{1}{2}}", "0.5"),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}"),
        (r"\boxed{x=56}", "56"),
        (r"\boxed{2x+y}", "y+2x"),
    ],
)
def test_equal_answers_earn_one(response: str, label: str) -> None:
    assert reward(response, label) == 1.0


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("", "56"),
        ("the answer is 56", "56"),
        (r"\boxed{}", "56"),
        (r"\boxed{56", "56"),
        (r"\boxed{56} and then \boxed{5", "56"),
        (r"\boxed{56} or rather \boxed{57}", "56"),
        (r"boxed{56}", "56"),
        (r"\boxed{-56}", "56"),
        (r"\boxed{5 6}", "56"),
        (r"\boxed{\frac{}{}}", "56"),
        (r"\boxed{\frac{1}{0}}", "56"),
        (r"\boxed{\left(\right.}", "56"),
        (r"\boxed{" + "9" * (LONGEST_ANSWER + 1) + "}", "9" * (LONGEST_ANSWER + 1)),
        (r"\boxed{" + "{" * 60 + "}" * 60 + "}", "56"),
        ("\\boxed{\ud800}", "56"),
        ("\\boxed{5\n6\x00}", "56"),
    ],
)
def test_other_answers_earn_nothing(response: str, label: str) -> None:
    assert reward(response, label) == 0.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [(r"a \boxed{1} b \boxed{\frac{1}{2}} c", r"\frac{1}{2}"), (r"\boxed{\{1\}}", r"\{1\}"), (r"\boxed{\}", None)],
)
def test_last_boxed_counts_braces(response: str, answer: str | None) -> None:
    assert last_boxed(response) == answer


@given(response=st.text(max_size=400), label=st.integers(-999, 999))
def test_arbitrary_text_earns_zero_or_one(response: str, label: int) -> None:
    assert reward(response, str(label)) in (0.0, 1.0)


@settings(max_examples=40, deadline=None)
@given(answer=st.text(alphabet=r"0123456789+-*/^.,xy{}()\fracsqt %$", max_size=12))
def test_arbitrary_answers_earn_zero_or_one(answer: str) -> None:
    assert reward(f"\\boxed{{{answer}}}", "56") in (0.0, 1.0)


@settings(max_examples=60, deadline=None)
@given(answer=st.from_regex(r"[+-]?[0-9]{1,4}", fullmatch=True), label=st.integers(-50, 50))
def test_the_integer_shortcut_decides_as_math_verify_does(answer: str, label: int) -> None:
    assert reward(f"\\boxed{{{answer}}}", str(label)) == float(_SHARED.is_equal(answer, str(label)))
    assert reward(f"\\boxed{{{answer}}}", str(int(answer))) == float(_SHARED.is_equal(answer, str(int(answer))))


_SHARED = Judge(seconds=60.0)


@pytest.fixture(scope="module", autouse=True)
def _close_shared() -> Iterator[None]:
    yield
    _SHARED.close()


def test_works_outside_the_main_thread() -> None:
    earned: list[float] = []
    thread = threading.Thread(target=lambda: earned.append(reward(r"\boxed{\frac{168}{3}}", "56")))
    thread.start()
    thread.join()
    assert earned == [1.0]


def test_an_answer_without_end_is_given_up_and_the_next_one_judged(caplog: pytest.LogCaptureFixture) -> None:
    judge = Judge(seconds=60.0)
    assert judge.is_equal(r"\frac{4}{2}", "2")
    judge._seconds = 0.5
    assert not judge.is_equal("1000000!", "2")
    assert "no verdict on the answer '1000000!' within 0.5 s" in caplog.text
    judge._seconds = 60.0
    assert judge.is_equal(r"\frac{6}{3}", "2")
    judge.close()


def test_a_killed_judge_costs_one_answer_at_most(judge: Judge) -> None:
    assert judge.is_equal(r"\frac{4}{2}", "2")
    assert judge._process is not None
    judge._process.kill()
    judge._process.wait()
    assert judge.is_equal(r"\frac{6}{3}", "2")


def test_a_judge_that_cannot_start_is_an_error(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="math-verify did not start"):
        judge.is_equal(r"\frac{4}{2}", "2")


def test_a_step_of_integer_answers_is_fast() -> None:
    responses = [(f"{i}+38={i + 38}. \\boxed{{{i + 38}}}", str(i + 38 + i % 2)) for i in range(64)]
    started = time.process_time()
    earned = [reward(response, label) for response, label in responses]
    assert time.process_time() - started < 0.05
    assert sum(earned) == 32


def test_the_module_is_light() -> None:
    modules = "samebits.rl.reward, samebits.rl.prompts, samebits.rl.chat"
    code = f"import sys, {modules}; print({{'torch', 'sympy', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
