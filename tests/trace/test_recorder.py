"""Digests that add up over columns, and records that do not depend on how a batch was laid out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from samebits.trace import Point, Recorder, Rows, Token, assemble, prefix_digests, row_digests
from samebits.trace.files import encode_traces, read_traces

ROWS = torch.randn(300, 96, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_parts_of_a_row_add_up_to_the_whole() -> None:
    whole = row_digests(ROWS)
    for cut in (1, 32, 95):
        assert torch.equal(row_digests(ROWS[:, :cut]) + row_digests(ROWS[:, cut:], start=cut), whole)


def test_one_bit_in_one_element_changes_the_digest() -> None:
    other = ROWS.clone()
    for row in range(300):
        other.view(torch.int16)[row, row % 96] ^= 1 << (row % 16)
    assert not bool((row_digests(other) == row_digests(ROWS)).any())
    assert len(set(row_digests(ROWS).tolist())) == 300


def test_the_place_of_an_element_counts() -> None:
    assert not bool((row_digests(ROWS.flip(1)) == row_digests(ROWS)).any())
    ones = torch.ones(2, 4)
    ones[0, 1], ones[1, 2] = -0.0, -0.0
    assert len(set(row_digests(ones).tolist())) == 2
    assert not torch.equal(row_digests(torch.zeros(1, 4)), row_digests(-torch.zeros(1, 4)))


def test_prefixes_name_the_first_row_that_differs_and_add_up() -> None:
    own = row_digests(ROWS)
    other = ROWS.clone()
    other[[100, 200]] = other[[200, 100]]
    wrong = prefix_digests(own) != prefix_digests(row_digests(other))
    assert int(wrong.nonzero()[0]) == 100
    assert not bool(wrong[:100].any())
    parts = [row_digests(ROWS[:, :40]), row_digests(ROWS[:, 40:], start=40)]
    assert torch.equal(sum(prefix_digests(part) for part in parts), prefix_digests(own))


def record(rows: torch.Tensor, order: torch.Tensor, starts: tuple[int, ...], capacity: int | None = None) -> list:
    """Per rank, the entries of one pass whose row i holds token order[i]; ranks hold columns from `starts` on."""
    ranks = []
    for start, end in zip(starts, (*starts[1:], rows.shape[1]), strict=True):
        recorder = Recorder(keep=[Point(0, "x")], capacity=capacity)
        recorder.place(Rows(torch.arange(len(order)), order % 3, order // 3))
        recorder.note(Point(0, "x"), rows[order][:, start:end], start=start, whole=rows.shape[1])
        recorder.collect()
        ranks.append(recorder.take())
    return ranks


def test_layouts_do_not_show() -> None:
    plain = assemble(record(ROWS, torch.arange(300), (0,)))
    shuffled = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    split = assemble(record(ROWS, shuffled, (0, 48), capacity=320))
    assert plain.digests == split.digests
    assert plain.widths == split.widths
    point = Point(0, "x")
    assert len(plain.digests[point]) == 300
    for token, row in plain.rows[point].items():
        assert (row == split.rows[point][token]).all()


def test_ranks_that_hold_the_same_must_agree() -> None:
    (first,), (second,) = record(ROWS, torch.arange(300), (0,)), record(ROWS.flip(0), torch.arange(300), (0,))
    assert assemble([first, first]).conflicts == []
    assert assemble([first, second]).conflicts[0] == (Point(0, "x"), Token(0, 0))


def test_a_fixed_capacity_keeps_its_addresses_and_refuses_more() -> None:
    recorder = Recorder(capacity=4)
    point = Point(0, "x")
    for pass_ in range(2):
        rows = torch.tensor([pass_, pass_ + 1])
        recorder.place(Rows(rows, torch.zeros(2, dtype=torch.int64), rows))
        recorder.note(point, ROWS)
        found = recorder._buffers[(point, 0, -1)].digests.data_ptr()
        recorder.collect()
        assert recorder._buffers[(point, 0, -1)].digests.data_ptr() == found
    digests = assemble([recorder.take()]).digests[point]
    assert [digests[Token(0, i)] for i in range(3)] == [d % (1 << 64) for d in row_digests(ROWS[:3]).tolist()]
    every = torch.arange(5)
    with pytest.raises(ValueError, match="capacity"):
        recorder.place(Rows(every, every, every))


def test_a_fixed_capacity_forgets_the_rows_of_a_larger_batch() -> None:
    recorder, point, places = Recorder(capacity=4), Point(0, "x"), torch.tensor([298, 299])
    recorder.place(Rows(places, torch.zeros_like(places), places))
    recorder.note(point, ROWS)
    recorder.collect()
    recorder.place(Rows(places[:1] * 0, places[:1] * 0, places[:1] * 0))
    recorder.note(point, ROWS[:2])
    recorder.collect()
    digests = assemble([recorder.take()]).digests[point]
    assert digests == {Token(0, row): int(row_digests(ROWS)[row]) % (1 << 64) for row in (0, 298, 299)}


def test_traces_come_back_from_a_file(tmp_path: Path) -> None:
    sides = {name: assemble(record(ROWS + value, torch.arange(300), (0, 48))) for name, value in (("a", 0), ("b", 1))}
    file = tmp_path / "traces.safetensors"
    file.write_bytes(encode_traces(sides))
    found = read_traces(file)
    for name, side in sides.items():
        assert (found[name].digests, found[name].dtypes) == (side.digests, side.dtypes)
        assert found[name].rows.keys() == side.rows.keys()
    assert found["a"].digests != found["b"].digests


def test_a_damaged_trace_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "traces.safetensors"
    good = encode_traces({"a": assemble(record(ROWS, torch.arange(300), (0,)))})
    for cut in (0, 5, 100, len(good) - 1):
        file.write_bytes(good[:cut])
        with pytest.raises(ValueError, match="no readable trace"):
            read_traces(file)
    tokens, digests = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for changed in (
        {"tokens": tokens},
        {"tokens": tokens, "digests": digests[:1]},
        {"tokens": torch.zeros(2, 3, dtype=torch.int64), "digests": digests},
        {"tokens": tokens, "digests": digests.float()},
        {"tokens": tokens, "digests": digests, "rows": tokens[:1]},
    ):
        save_file({f"trainer/0.q/bfloat16/{kind}": tensor.clone() for kind, tensor in changed.items()}, file)
        with pytest.raises(ValueError, match="are not the tokens and digests of a trace"):
            read_traces(file)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    save_file({"trainer/q/bfloat16/tokens": torch.zeros(1, 2)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="no tensor of a trace"):
        read_traces(tmp_path / "x.safetensors")
