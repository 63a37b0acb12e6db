"""What a user sees while a job runs: one line per step, and a bar below them on a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from samebits.cli.progress import Watch
from samebits.testing.runs import write_run
from samebits.timeline.events import Event
from samebits.timeline.ledger import read


@pytest.fixture
def events(tmp_path: Path) -> tuple[Event, ...]:
    write_run(tmp_path / "run", flips={(2, 1)})
    return read(tmp_path / "run" / "timeline.jsonl").events


def test_without_a_terminal_each_step_is_a_line(events: tuple[Event, ...]) -> None:
    stream = io.StringIO()
    with Watch(stream) as watch:
        for event in events:
            watch(event)
    lines = stream.getvalue().splitlines()
    assert lines[1] == "after step 0: held-out accuracy 0.500"
    assert lines[2].startswith("step 1/2  reward 0.333  mismatch_count 0 of 18  max_abs_diff 0  KL 0.01  ")
    assert lines[3].startswith("step 2/2  reward 0.333  mismatch_count 1 of 18  max_abs_diff 2.38e-07  KL 0.02  ")
    assert lines[4] == "after step 2: held-out accuracy 0.750"
    assert len(lines) == 5


def test_on_a_narrow_terminal_a_bar_stands_below_the_same_lines(
    events: tuple[Event, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    watch = Watch(stream)
    monkeypatch.setattr(watch, "_console", Console(file=stream, force_terminal=True, width=80, soft_wrap=True))
    with watch:
        for event in events:
            watch(event)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "step 2/2  reward 0.333  mismatch_count 1 of 18" in shown
    assert re.search(r"training ━+ 2/2 ", shown)
    assert "…" not in shown
