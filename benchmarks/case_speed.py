"""What R/R costs next to P/P: whole jobs of the default preset, interleaved, in one session of one machine.

    .venv/bin/python benchmarks/case_speed.py --repeats 3 --steps 12

writes benchmarks/results/case_speed.json. The first steps of each job (warm-up) are left out; a ratio is that of
the medians over all steps of all repeats, so that above 1 means that R/R is faster.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from results import ROOT, provenance

CASES = ("R/R", "P/P")
WARM_UP = 2


def steps_of(case: str, steps: int, directory: Path) -> list[dict[str, float]]:
    """Seconds, seconds of generation and tokens of each step of one job after the warm-up."""
    command = [
        str(Path(sys.executable).parent / "samebits"), "run", "--case", case, "--run-dir", str(directory),
        "--num-rollout", str(steps), "--eval-interval", "0",
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    events = [json.loads(line) for line in (directory / "timeline.jsonl").read_text().splitlines()]
    return [
        {
            "seconds": sum(event["seconds"].values()),
            "generate": event["seconds"]["generate"],
            "train": event["seconds"]["train"],
            "tokens": event["generated_tokens"],
        }
        for event in events
        if event["kind"] == "timed"
    ][WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    measured: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    with TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats):
            for case in CASES:
                directory = Path(folder) / f"{repeat}{case.replace('/', '')}"
                measured[case] += steps_of(case, arguments.steps, directory)
    medians = {
        case: {
            "seconds_per_step": median(step["seconds"] for step in steps),
            "train_seconds": median(step["train"] for step in steps),
            "tokens_per_second": median(step["tokens"] / step["generate"] for step in steps),
        }
        for case, steps in measured.items()
    }
    ours, native = medians["R/R"], medians["P/P"]
    ratios = {
        "generation": ours["tokens_per_second"] / native["tokens_per_second"],
        "step": native["seconds_per_step"] / ours["seconds_per_step"],
        "training": native["train_seconds"] / ours["train_seconds"],
    }
    record = {"what": "R/R beside P/P", **provenance(), "ratios": ratios, "medians": medians, "steps": measured}
    (ROOT / "benchmarks/results/case_speed.json").write_text(json.dumps(record, indent=1) + "\n")
    for name, ratio in ratios.items():
        print(f"{name}: R/R runs at {ratio:.2f} times the speed of P/P")


if __name__ == "__main__":
    main()
