"""Several real rollout engines: all get every publication, the records name each, and the bits are those of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from samebits.evidence.sidecar import StepSample, read_step, sidecar_name
from samebits.evidence.verdict import Verdict
from samebits.evidence.verify import verify
from samebits.timeline.events import Published, Sampled
from samebits.timeline.ledger import read


def facts(sample: StepSample) -> tuple[tuple[int, ...], ...]:
    return tuple(sample.token_ids), tuple(sample.rollout_bits), tuple(sample.trainer_bits)


def test_two_engines_share_the_prompts_and_give_the_bits_of_one(start: Callable, tmp_path: Path) -> None:
    jobs = []
    for engines in (1, 2):
        job = start(f"of-{engines}", rollout_engines=engines, num_rollout=2)
        assert job.wait() == Verdict.SAME.exit_code, job.output + job.logs()
        jobs.append(job.path)
    one, two = jobs
    for step in (1, 2):
        left, right = (read_step(run / sidecar_name(step)) for run in (one, two))
        assert [facts(sample) for sample in left] == [facts(sample) for sample in right]
    events = read(two / "timeline.jsonl").events
    assert [event.engines for event in events if isinstance(event, Published)] == [2, 2, 2]
    sampled = [event for event in events if isinstance(event, Sampled)]
    assert {event.engine for event in sampled} == {0, 1}
    served: dict[str, set[int]] = {}
    for event in sampled:
        served.setdefault(event.key.rsplit("/", 1)[0], set()).add(event.engine)
    assert all(len(engines) == 1 for engines in served.values()), "a prompt was torn between engines"
    routes = [json.loads(path.read_text()) for path in sorted((two / "routes").iterdir())]
    assert sorted(r["engine"] for r in routes if r["role"] == "rollout") == [0, 1]
    assert len({r["process"] for r in routes}) == len(routes) == 3

    record = next(p for p in (two / "routes").iterdir() if json.loads(p.read_text())["engine"] == 1)
    record.unlink()
    assert verify(two).verdict is Verdict.CANNOT_TELL, "an engine without its record was not missed"
