"""A small ablation with the real engines, killed in the middle and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samebits.evidence.sidecar import read_step

SMALL = {
    "arm": ["M111", "M000"],
    "num-rollout": 2,
    "samples-per-prompt": 2,
    "global-batch-size": 8,
    "max-response-length": 16,
}


def command(folder: Path, **changes: object) -> list[str]:
    settings = {**SMALL, **{key.replace("_", "-"): value for key, value in changes.items()}}
    words = [
        word
        for key, value in settings.items()
        for one in (value if isinstance(value, list) else [value])
        for word in (f"--{key}", str(one))
    ]
    return [sys.executable, "-m", "samebits.cli.main", "ablate", "--run-dir", str(folder), "--tensorboard", *words]


def kill_after(folder: Path, file: str) -> None:
    """Starts the ablation and kills it, and all that it started, once `file` is there."""
    job = subprocess.Popen(command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    end = time.monotonic() + 300
    while not (folder / file).is_file() and time.monotonic() < end and job.poll() is None:
        time.sleep(0.1)
    os.killpg(job.pid, signal.SIGKILL)
    said = job.communicate()[1].decode()
    assert (folder / file).is_file(), said


@pytest.fixture(scope="module")
def ablation(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, bytes]:
    """The folder, what the second start printed, and the seal of the arm that the first one finished."""
    folder = tmp_path_factory.mktemp("ablate") / "x"
    kill_after(folder, "free/M000/timeline.jsonl")
    seal = (folder / "free/M111/seal.json").read_bytes()
    assert not (folder / "free/M000/seal.json").exists()
    (folder / "free/M000/timeline.jsonl").unlink()  # as if it had been killed a moment before
    done = subprocess.run(command(folder), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout + done.stderr, seal


def test_finished_arms_are_kept(ablation: tuple[Path, str, bytes]) -> None:
    folder, said, seal = ablation
    assert "1/4 free M111: kept" in said
    assert "2/4 free M000: different" in said
    assert (folder / "free/M111/seal.json").read_bytes() == seal
    assert len(list(folder.rglob("events.out.tfevents.*"))) == 4


def test_the_table_tells_the_arms_apart(ablation: tuple[Path, str, bytes]) -> None:
    folder, said, _ = ablation
    views = json.loads((folder / "ablation.json").read_text())["views"]
    for view in ("free", "equal"):
        rows = {row["arm"]: row for row in views[view]}
        assert (rows["M111"]["status"], rows["M111"]["mismatch_count"]) == ("same", 0)
        assert rows["M000"]["status"] == "different"
        assert rows["M000"]["mismatch_count"] > 10
        assert rows["M111"]["compared_tokens"] > 50
        assert rows["M000"]["tokens_per_second"] > 0
    assert "Equal work" in said
    assert (folder / "ablation.md").read_text().count("| M111 | R/R | R/R | R/R | same | 0 | 0 | 0 |") == 2


def test_equal_work_is_the_same_tokens_and_other_bits(ablation: tuple[Path, str, bytes]) -> None:
    """The strict arm gives its own bits again; the native one scores the same tokens with other bits."""
    folder = ablation[0]
    for step in (1, 2):
        name = f"steps/step_{step:05d}.safetensors"
        free, strict, native = (read_step(folder / run / name) for run in ("free/M111", "equal/M111", "equal/M000"))
        assert strict == free
        assert [s.token_ids for s in native] == [s.token_ids for s in free]
        assert [s.rollout_bits for s in native] != [s.rollout_bits for s in free]
        assert [s.trainer_bits for s in native] != [s.trainer_bits for s in free]


def test_the_records_give_the_table(ablation: tuple[Path, str, bytes]) -> None:
    verify = [sys.executable, "-m", "samebits.cli.main", "verify", str(ablation[0])]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "equal M000: status different" in done.stdout


def test_the_folder_is_held_to_its_plan(ablation: tuple[Path, str, bytes]) -> None:
    done = subprocess.run(command(ablation[0], num_rollout=3), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "holds another ablation: config.num_rollout was 2, now 3" in done.stderr


def test_a_finished_arm_is_verified_before_it_is_kept(ablation: tuple[Path, str, bytes]) -> None:
    folder = ablation[0]
    step = folder / "free/M000/steps/step_00001.safetensors"
    content = step.read_bytes()
    step.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = subprocess.run(command(folder), capture_output=True, text=True, timeout=120)
    step.write_bytes(content)
    assert done.returncode == 2
    assert "a finished arm's records do not hold: steps/step_00001.safetensors was changed" in done.stderr
