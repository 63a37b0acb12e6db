"""What R/R costs next to P/P: whole jobs of the default preset, interleaved, on one machine in one go.

    .venv/bin/python benchmarks/case_speed.py --repeats 3 --steps 12

writes benchmarks/results/case_speed.json. The first steps of each job (warm-up) are left out; a ratio is that of
the medians over all steps of all repeats, so that above 1 means that R/R is faster.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from results import events_of, provenance, save

# what runs: the strict job, the native job as it is by default, and the native job with vLLM's compiled mode
ARMS = {"R/R": ("--case", "R/R"), "P/P": ("--case", "P/P"), "P/P compiled": ("--case", "P/P", "--native-compile")}
WARM_UP = 2


def steps_of(arm: str, steps: int, directory: Path) -> list[dict[str, float]]:
    """Seconds, seconds of generation and tokens of each step of one job after the warm-up."""
    command = [
        str(Path(sys.executable).parent / "samebits"), "run", *ARMS[arm], "--run-dir", str(directory),
        "--num-rollout", str(steps), "--eval-interval", "0",
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    # the code is that of the verdict, and native arms differ
    events = events_of(directory)
    timed = [
        {
            "seconds": sum(event["seconds"].values()),
            "generate": event["seconds"]["generate"],
            "train": event["seconds"]["train"],
            "tokens": event["generated_tokens"],
        }
        for event in events
        if event["kind"] == "timed"
    ]
    if len(timed) != steps:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return timed[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    measured: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats):
            for number, arm in enumerate(ARMS):
                measured[arm] += steps_of(arm, arguments.steps, Path(folder) / f"{repeat}-{number}")
    medians = {
        arm: {
            "seconds_per_step": median(step["seconds"] for step in steps),
            "train_seconds": median(step["train"] for step in steps),
            "tokens_per_second": median(step["tokens"] / step["generate"] for step in steps),
        }
        for arm, steps in measured.items()
    }
    ours = medians["R/R"]
    ratios = {
        arm: {
            "generation": ours["tokens_per_second"] / native["tokens_per_second"],
            "step": native["seconds_per_step"] / ours["seconds_per_step"],
            "training": native["train_seconds"] / ours["train_seconds"],
        }
        for arm, native in medians.items()
        if arm != "R/R"
    }
    record = {"what": "R/R beside P/P", **provenance(), "ratios": ratios, "medians": medians, "steps": measured}
    save("case_speed", record)
    for arm, speeds in ratios.items():
        print(f"R/R against {arm}: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in speeds.items()))


if __name__ == "__main__":
    main()
