"""Every conformance case: the two sides of each give the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samebits.testing.cases import OPS, Case, OutOfBounds, Subject, cases
from samebits.testing.cases.case import against_definition
from samebits.testing.cases.guards import guarded
from samebits.testing.cases.inputs import inside
from samebits.testing.cases.schedules import INSTRUCTION_SETS
from samebits.testing.conformance import DIFFERS, REFUSED, SAME, Row, chosen, main, run, table
from samebits.testing.definitions import Definitions

CPU = Subject("cpu")


@pytest.mark.parametrize("row", table(CPU), ids=str)
def test_case(row: Row) -> None:
    result = run(row)
    if result.outcome == REFUSED and row.case.name.endswith(INSTRUCTION_SETS):
        pytest.skip(result.why)
    assert result.outcome == SAME, result


def test_making_the_table_draws_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(*_: object, **__: object) -> None:
        raise AssertionError("a number was drawn")

    for name in ("randn", "rand", "randint", "randperm", "empty", "zeros", "arange"):
        monkeypatch.setattr(torch, name, drawn)
    assert len(table(CPU, long=True)) > len(table(CPU)) > 200


def test_every_row_prints_as_its_own_filter() -> None:
    rows = table(CPU, long=True)
    assert len({str(row) for row in rows}) == len(rows)
    assert all(chosen(rows, str(row)) == [row] for row in rows)
    assert {row.case.op for row in chosen(rows, "gradients")} < set(OPS)


def test_a_filter_of_several_words_needs_all_of_them() -> None:
    rows = chosen(table(CPU), "linear gradients")
    assert rows
    assert all("linear" in str(row) and "gradients" in str(row) for row in rows)


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_the_cases_that_the_suite_promises(op: str) -> None:
    names = " ".join(case.name for case in cases(op))
    for kind in ("poison", "scalar", "avx2", "threads3"):
        assert kind in names, kind
    assert "special" in names or op in ("sample", "sample_support")  # which refuse them: tests/ops/test_sample*.py


@pytest.mark.parametrize("where", [-1, 12])
def test_a_write_outside_a_tensor_is_noticed(where: int) -> None:
    def write() -> None:
        x = torch.empty(3, 4)
        x.as_strided((1,), (1,), x.storage_offset() + where).zero_()

    with pytest.raises(OutOfBounds, match=r"tensor \[3, 4\] of torch.float32"), guarded():
        write()


def test_what_is_not_written_is_nan() -> None:
    with guarded():
        floats, integers = torch.empty(5), torch.empty_like(torch.arange(3))
    assert bool(floats.isnan().all())
    assert integers.tolist() == [-1, -1, -1]


def test_views_lie_between_poison() -> None:
    view = inside(torch.ones(2, 3), (1, 2))
    assert view.stride() == (7, 1)
    assert int(view.as_strided((28,), (1,), 0).isnan().sum()) == 22


@pytest.mark.parametrize(("value", "outcome"), [(1.0, SAME), (-1.0, DIFFERS)])
def test_what_a_definition_gives_is_computed_once(tmp_path: Path, value: float, outcome: str) -> None:
    computed = []

    def compute(at: Subject) -> list[torch.Tensor]:
        computed.append(at.backend)
        return [torch.tensor([1.0 if at.backend == "reference" else value])]

    row = Row(against_definition("linear", "made-up", compute), CPU)
    assert [run(row, Definitions(tmp_path)).outcome for _ in range(2)] == [outcome] * 2
    assert computed.count("reference") == (1 if outcome == SAME else 3)  # again where a difference is to be shown
    for path in tmp_path.rglob("*.json"):
        path.write_text('["wrong"]')
    assert run(row, Definitions(tmp_path)).outcome == outcome


def test_a_refusal_is_told_from_a_difference() -> None:
    case = Case("linear", "made-up", lambda at: [torch.ones(2)], lambda at: [torch.tensor([1.0, -1.0])])
    assert run(Row(case, CPU)).outcome == DIFFERS
    assert "refused" in str(run(Row(next(iter(cases("linear"))), Subject("nobody"))))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--filter", "swiglu cpu width17"]) == 0
    assert capsys.readouterr().out.endswith("\n1 cases: 1 same, 0 DIFFERS, 0 FAILED, 0 refused\n")
    assert main(["--list", "--filter", "swiglu cpu width17"]) == 0
    assert capsys.readouterr().out == "swiglu cpu width17\n"
    assert main(["--backend", "nobody", "--filter", "swiglu width17"]) == 2
    assert "no backend 'nobody'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--filter", "rms_norm nowhere"], "error: no case contains the words of 'rms_norm nowhere'; see --list"),
        (["--device", "gpu"], "error: device 'gpu': want cpu, or a card that torch sees, such as cuda or cuda:1: "),
        (["--device", "cuda:99", "--backend", "triton"], "error: device 'cuda:99': want cpu, or a card"),
    ],
)
def test_where_nothing_can_run_the_reason_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(message)
    assert shown.err.count("\n") == 1
