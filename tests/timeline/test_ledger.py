"""The ledger: what goes in comes out, and damage is named by line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.timeline.events import KINDS, Event, RunFinished, from_line, parse_json, to_line
from samebits.timeline.ledger import Ledger, read

FINITE = st.floats(allow_nan=False, allow_infinity=False)
BY_TYPE: dict[str, st.SearchStrategy[object]] = {
    "str": st.text(),
    "int": st.integers(min_value=-(2**63), max_value=2**63),
    "float": FINITE,
    "str | None": st.none() | st.text(),
    "dict[str, str]": st.dictionaries(st.text(), st.text()),
    "dict[str, float]": st.dictionaries(st.text(), FINITE),
}


def events() -> st.SearchStrategy[Event]:
    return st.one_of(
        [
            st.builds(cls, **{field.name: BY_TYPE[str(field.type)] for field in dataclasses.fields(cls)})
            for cls in KINDS.values()
        ]
    )


@given(event=events(), seq=st.integers(0, 1 << 40))
def test_a_line_gives_its_event_back(event: Event, seq: int) -> None:
    line = to_line(event, seq, 1.5)
    assert "\n" not in line
    assert from_line(line) == (seq, 1.5, event)


def test_floats_that_are_not_numbers_are_refused() -> None:
    timed = KINDS["timed"](step=1, generated_tokens=1, seconds={"generate": float("nan")})  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_line(timed, 0, 0.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind":"run_finished","seq":0,"time":1,"steps":true}', "steps: want"),
        ('{"kind":"run_finished","seq":0,"time":1}', r"missing fields \['steps'\]"),
        ('{"kind":"run_finished","seq":0,"time":1,"steps":1,"x":1}', r"unknown fields \['x'\]"),
        ('{"kind":"run_done","seq":0,"time":1,"steps":1}', "unknown kind 'run_done'"),
        ('{"kind":"run_finished","seq":"0","time":1,"steps":1}', "seq must be an integer"),
        ('{"kind":"run_finished","seq":0,"time":NaN,"steps":1}', "NaN is not a JSON number"),
        ('{"kind":"run_finished","seq":0,"seq":1,"time":1,"steps":1}', "duplicate key 'seq'"),
        ("[1]", "want a JSON object"),
        ("{", "Expecting property name"),
    ],
)
def test_a_malformed_line_says_what_is_wrong(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_line(line)


def test_deep_nesting_is_an_error_and_not_a_crash() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 200_000)


def write(path: Path, count: int) -> None:
    with Ledger(path) as ledger:
        for step in range(count):
            ledger.append(RunFinished(steps=step))


def test_the_reader_returns_what_was_appended(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", 3)
    timeline = read(tmp_path / "t.jsonl")
    assert timeline.problem is None
    assert timeline.events == tuple(RunFinished(steps=step) for step in range(3))


def test_an_existing_ledger_is_never_touched(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", 1)
    with pytest.raises(FileExistsError):
        Ledger(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    ("damage", "kept", "message"),
    [
        (lambda lines: lines[:1] + lines[2:], 1, "line 2: seq is 2, want 1"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], 0, "line 1: seq is 1, want 0"),
        (lambda lines: [*lines[:2], lines[2][:-7]], 2, "line 3: torn"),
        (lambda lines: [lines[0], b"\xff\n", lines[2]], 1, "line 2: 'utf-8'"),
    ],
    ids=["deleted", "swapped", "torn", "not-utf8"],
)
def test_damage_is_named_and_what_stands_before_it_is_kept(tmp_path, damage, kept, message) -> None:
    path = tmp_path / "t.jsonl"
    write(path, 3)
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    timeline = read(path)
    assert len(timeline.events) == kept
    assert timeline.problem is not None
    assert timeline.problem.startswith(message)


def test_a_failed_write_leaves_the_earlier_lines_whole(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "t.jsonl"
    with Ledger(path) as ledger:
        ledger.append(RunFinished(steps=0))
        import os

        real = os.write

        def half(file: int, data: bytes) -> int:
            if len(data) > 20:
                return real(file, data[:20])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space left"):
            ledger.append(RunFinished(steps=1))
        monkeypatch.undo()
    timeline = read(path)
    assert timeline.problem is None
    assert timeline.events == (RunFinished(steps=0),)
