"""No bit changes without a new version of its boundary, and nobody records digests without a reason."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from samebits.ops.linear.contract import LINEAR, LINEAR_GRADIENT
from samebits.ops.sample.contract import SAMPLE
from samebits.testing import golden
from samebits.testing.cases import OPS, Case, Subject
from samebits.testing.golden import Keeper, Refused, contract_of

REAL = Keeper()


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
@pytest.mark.parametrize("op", REAL.ops())
def test_every_case_gives_the_recorded_bits(op: str, isa: str, instruction_set: Callable[[str], None]) -> None:
    instruction_set(isa)
    assert REAL.problems(op) == []


def test_a_contract_names_every_boundary_of_an_op() -> None:
    assert contract_of("linear") == f"{LINEAR.id} {LINEAR_GRADIENT.id}"
    assert contract_of("sample") == SAMPLE.id


def flipped(case: Case) -> Case:
    """The same case with the last bit of one output element changed, as a wrong kernel would."""

    def left(at: Subject) -> list[torch.Tensor]:
        first, *rest = case.left(at)
        first = first.clone()
        integers = first.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]).flatten()
        integers[-1] ^= 1
        return [first, *rest]

    return dataclasses.replace(case, left=left)


@pytest.mark.parametrize("op", OPS)
def test_one_changed_bit_is_noticed_and_its_case_named(op: str) -> None:
    own = [case for case in REAL.cases if case.op == op]
    last = own[-1]
    keeper = Keeper(cases=[*own[:-1], flipped(last)])
    (line,) = keeper.problems(op)
    assert line.startswith(f"{last}: output 0 changed under {contract_of(op)}: recorded ")


def numbers(name: str, value: float = 1.0, op: str = "linear") -> Case:
    return Case(op, name, *[lambda at: [torch.full((4,), value)]] * 2)


@dataclasses.dataclass
class Bench:
    folder: Path
    version: str = "linear@1"
    inputs: str = "numbers"

    def keeper(self, *cases: Case) -> Keeper:
        return Keeper(cases, self.folder, self.folder / "CHANGES.md", lambda op: self.version, lambda: self.inputs)

    def changelog(self) -> str:
        return (self.folder / "CHANGES.md").read_text()

    def edit(self, change: Callable[[dict], None]) -> None:
        path = self.folder / "linear.json"
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "CHANGES.md").write_text("# Changes\n\n## 2\n\n- older words\n\n## 1\n\n- first\n")
    made = Bench(tmp_path)
    assert made.keeper(numbers("a"), numbers("b", 2.0)).bless("the op is new") == ["linear.json"]
    return made


def test_the_reason_stands_in_the_newest_section(bench: Bench) -> None:
    before, after = bench.changelog().split("\n## 1\n")
    assert after == "\n- first\n"
    assert before.startswith("# Changes\n\n## 2\n\n- older words\n- Golden digests of `linear` (linear@1: ")
    assert before.endswith("): the op is new\n")


def test_recorded_bits_are_no_problem_and_need_no_second_record(bench: Bench) -> None:
    keeper, text = bench.keeper(numbers("a"), numbers("b", 2.0)), bench.changelog()
    assert keeper.problems("linear") == []
    assert keeper.bless("again") == []
    assert bench.changelog() == text


def test_a_changed_digest_is_noticed(bench: Bench) -> None:
    bench.edit(lambda data: data["cases"]["b"]["linear@1"].__setitem__(0, "0" * 64))
    lines = bench.keeper(numbers("a"), numbers("b", 2.0)).problems("linear")
    assert any(line.startswith("linear b: output 0 changed under linear@1: recorded 000000000000") for line in lines)
    assert "CHANGES.md gives no reason for the content" in lines[0]


def test_digests_made_to_fit_by_hand_have_no_reason(bench: Bench) -> None:
    made = golden.outputs(numbers("b", 3.0))
    bench.edit(lambda data: data["cases"]["b"].update({"linear@1": made}))
    (line,) = bench.keeper(numbers("a"), numbers("b", 3.0)).problems("linear")
    assert "CHANGES.md gives no reason for the content" in line


@pytest.mark.parametrize("reason", ["", "  \n"])
def test_there_is_no_recording_without_a_reason(bench: Bench, reason: str) -> None:
    with pytest.raises(Refused, match="needs a reason"):
        bench.keeper(numbers("c")).bless(reason)


def test_other_bits_under_the_same_version_are_refused_and_nothing_is_written(bench: Bench) -> None:
    text, digests = bench.changelog(), (bench.folder / "linear.json").read_bytes()
    with pytest.raises(Refused, match=r"give the boundary a new version first\)[^:]*:\nlinear b: output 0 changed"):
        bench.keeper(numbers("a"), numbers("b", 3.0), numbers("c")).bless("faster")
    assert (bench.changelog(), (bench.folder / "linear.json").read_bytes()) == (text, digests)


def test_a_case_that_fails_is_not_recorded(bench: Bench) -> None:
    wrong = dataclasses.replace(numbers("c"), right=lambda at: [torch.zeros(4)])
    with pytest.raises(Refused, match="linear c: its two sides differ: output 0: 4 of 4 elements differ"):
        bench.keeper(numbers("a"), numbers("b", 2.0), wrong).bless("new")


def test_a_new_version_is_recorded_beside_the_old_one(bench: Bench) -> None:
    keeper = bench.keeper(numbers("a"), numbers("b", 3.0))
    bench.version = "linear@2"
    assert keeper.problems("linear")[0].startswith("linear a: no digest is recorded under linear@2; run python -m")
    assert keeper.bless("K in segments of 512") == ["linear.json"]
    assert keeper.problems("linear") == []
    assert "(linear@2: " in bench.changelog()
    bench.version = "linear@1"
    assert [line.split(":")[0] for line in keeper.problems("linear")] == ["linear b"]


def test_new_and_removed_cases_and_ops_are_problems_until_they_are_recorded(bench: Bench) -> None:
    keeper = bench.keeper(numbers("a"), numbers("c"), numbers("x", op="rotary"))
    assert [line.split(",")[0] for line in keeper.problems("linear")] == [
        "linear b: recorded",
        f"linear c: no digest is recorded under linear@1; run {golden.COMMAND}",
    ]
    assert keeper.problems("rotary") == [f"rotary: no digests are recorded; run {golden.COMMAND}"]
    assert keeper.bless("other cases") == ["linear.json", "rotary.json"]
    assert keeper.problems("linear") == keeper.problems("rotary") == []
    without = bench.keeper(numbers("x", op="rotary"))
    assert without.bless("gone") == ["linear.json"]
    assert without.ops() == ["rotary"]


def test_a_case_with_another_number_of_outputs_is_noticed(bench: Bench) -> None:
    two = dataclasses.replace(numbers("a"), left=lambda _: [torch.ones(4), torch.ones(4)])
    (line,) = bench.keeper(two, numbers("b", 2.0)).problems("linear")
    assert line == "linear a: 2 outputs, recorded under linear@1 are 1"


def test_other_random_inputs_are_told_from_other_bits(bench: Bench) -> None:
    bench.inputs = "others"
    keeper = bench.keeper(numbers("a", 5.0), numbers("b", 6.0))
    (line,) = keeper.problems("linear")
    assert "draws other random numbers" in line
    assert keeper.bless("a newer torch draws other numbers") == ["linear.json"]
    assert keeper.problems("linear") == []


def test_a_changelog_without_a_section_is_refused(bench: Bench) -> None:
    (bench.folder / "CHANGES.md").write_text("# Changes\n")
    with pytest.raises(Refused, match="no section"):
        bench.keeper(numbers("a"), numbers("b", 2.0), numbers("c")).bless("one more")
    assert "c" not in json.loads((bench.folder / "linear.json").read_text())["cases"]


def test_the_command_refuses_without_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert golden.main(["--bless"]) == 2
    assert capsys.readouterr().err.startswith("refused: recording needs a reason")
