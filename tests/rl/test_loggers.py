"""Numbers reach TensorBoard and W&B under the field's names, and a logger that is not installed says so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from samebits.evidence.scalars import Scalars
from samebits.evidence.verdict import Verdict
from samebits.evidence.verify import verify
from samebits.rl import loggers as room
from samebits.rl.config import RunConfig
from samebits.rl.loggers import check_loggers, loggers
from samebits.testing.runs import write_run
from samebits.timeline.ledger import read

NAMES = {
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/grad_norm",
    "critic/rewards/mean",
    "response_length/mean",
    "rollout_corr/k3_kl",
    "rollout_corr/rollout_is_max",
    "training/rollout_logp_abs_diff_p99.9",
    "training/rollout_logp_abs_diff_max",
    "samebits/mismatch_count",
    "perf/throughput",
    "timing_s/gen",
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", steps=3, flips={(2, 1), (2, 4)})
    return tmp_path / "run"


def feed(run: Path, config: RunConfig) -> None:
    with loggers(config) as watch:
        for event in read(run / "timeline.jsonl").events:
            watch(event)


def scalars(run: Path) -> list[tuple[int, dict[str, float]]]:
    collecting = Scalars()
    return [found for event in read(run / "timeline.jsonl").events if (found := collecting.take(event))]


def test_every_step_has_its_numbers(run: Path) -> None:
    found = scalars(run)
    assert [step for step, _ in found] == [0, 1, 2, 3, 3]
    steps = [values for _, values in found if "actor/loss" in values]
    assert all(set(values) >= NAMES for values in steps)
    assert [values["samebits/mismatch_count"] for values in steps] == [0, 2, 0]
    assert steps[1]["rollout_corr/k3_kl"] > 0 == steps[0]["rollout_corr/k3_kl"]
    assert all(math.isfinite(value) for values in steps for value in values.values())


def logged(folder: Path) -> Iterator[tuple[int, str, float]]:
    """What lies in TensorBoard's files: length, checksum, message, checksum."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2", reason="tensorboardX is not installed")
    for file in folder.iterdir():
        content, at = file.read_bytes(), 0
        while at < len(content):
            size = int.from_bytes(content[at : at + 8], "little")
            event = event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
            yield from ((event.step, value.tag, value.simple_value) for value in event.summary.value)
            at += 16 + size


@pytest.mark.skipif(find_spec("tensorboardX") is None, reason="tensorboardX is not installed")
def test_tensorboard_holds_them(run: Path) -> None:
    feed(run, RunConfig(run_dir=str(run), tensorboard=True))
    found = {(step, name): value for step, name, value in logged(run / "tracking/tensorboard")}
    assert found[2, "samebits/mismatch_count"] == 2
    assert found[3, "actor/grad_norm"] == pytest.approx(1 + 1 / 3)
    assert found[0, "val-core/accuracy/mean"] == 0.5
    # beside the records, not among them
    assert verify(run).verdict is Verdict.DIFFERENT


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed (pip install samebits[wandb])")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_stays_offline(run: Path) -> None:
    feed(run, RunConfig(run_dir=str(run), wandb="offline"))
    (file,) = (run / "tracking/wandb").glob("offline-run-*/run-*.wandb")
    assert b"samebits/mismatch_count" in file.read_bytes()


@pytest.mark.parametrize(
    ("name", "settings"), [("tensorboard", {"tensorboard": True}), ("wandb", {"wandb": "offline"})]
)
def test_a_logger_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, name: str, settings: dict) -> None:
    monkeypatch.setattr(room, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=rf"{name}: the package \w+ is not installed: pip install samebits\[{name}\]"):
        check_loggers(RunConfig(**settings))
    check_loggers(RunConfig())
