"""What the order of additions costs: strict against native collectives, and a training step by layout.

    .venv/bin/python benchmarks/layouts.py                      # all of it, under 4 minutes on 2 quiet cores
    .venv/bin/python benchmarks/layouts.py --sizes 4 --ranks 2 --calls 20 --layouts tp1 --steps 3 --out trial.json

writes benchmarks/results/layouts.json. Arms are interleaved call by call; times are medians over calls of the slowest
rank's median. Ranks are processes of one machine, so more ranks than cores measure scheduling too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import collective_calls
from collective_calls import ARMS
from results import events_of, provenance, save

from samebits.testing.ranks import run_ranks

WARM_UP = 2
# settings of whole jobs: strict, and the frameworks' own code where it has the layout
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tp1": (),
    "tp1 native": ("--case", "P/P"),
    "tp2": ("--train-tp", "2", "--rollout-tp", "2"),
    "tp2 native": ("--case", "P/P", "--train-tp", "2", "--rollout-tp", "2"),
    "cp2, one engine": ("--train-cp", "2"),
    "dp2, two engines": ("--train-dp", "2", "--rollout-engines", "2"),
}


def measure_collectives(ranks: int, sizes: list[int], calls: int) -> list[dict[str, object]]:
    """One row per operation and size: microseconds of each arm."""
    with TemporaryDirectory() as folder:
        answers = run_ranks(collective_calls.__file__, "program", ranks, Path(folder), json.dumps(sizes), str(calls))
    rows: list[dict[str, object]] = []
    for key in answers[0]:
        name, kib = key.rsplit(" ", 1)
        times = [max(median(answer[key][arm].tolist()) for answer in answers) for arm in range(len(ARMS))]
        row = {"operation": name, "ranks": ranks, "kib": int(kib), **dict(zip(ARMS, times, strict=True))}
        rows.append(row)
        print(f"{name:15} {ranks} ranks {kib:>6} KiB  " + "  ".join(f"{t:9.0f} us" for t in times), flush=True)
    return rows


def step_times(layout: str, steps: int, directory: Path) -> list[float]:
    """Seconds of each training step of one job after the warm-up."""
    command = [
        sys.executable, "-m", "samebits.cli.main", "run", *LAYOUTS[layout], "--run-dir", str(directory),
        "--num-rollout", str(steps + WARM_UP), "--eval-interval", "0",
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    events = events_of(directory)
    seconds = [sum(event["seconds"].values()) for event in events if event["kind"] == "timed"]
    return seconds[WARM_UP:]


def measure_steps(layouts: list[str], steps: int, repeats: int) -> list[dict[str, object]]:
    """One row per layout: seconds per step, over interleaved repeats."""
    taken: dict[str, list[float]] = {layout: [] for layout in layouts}
    with TemporaryDirectory() as folder:
        for repeat in range(repeats):
            for number, layout in enumerate(layouts):
                taken[layout] += step_times(layout, steps, Path(folder) / f"{repeat}-{number}")
    rows: list[dict[str, object]] = []
    for layout, seconds in taken.items():
        row = {"layout": layout, "settings": list(LAYOUTS[layout]), "seconds_per_step": median(seconds), "all": seconds}
        rows.append(row)
        print(f"{layout:20} {median(seconds):.3f} s a step", flush=True)
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--sizes", type=int, nargs="+", default=[4, 64, 1024, 8192], help="KiB per rank")
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--calls", type=int, default=100)
    arguments.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--repeats", type=int, default=1)
    arguments.add_argument("--out", type=Path, help="a JSON file, instead of the record in benchmarks/results")
    given = arguments.parse_args()
    record = {
        "what": "collectives: microseconds per call, strict (the contract's tree, fp32) and native (torch.distributed "
        "over gloo), fp32; steps: seconds per training step of whole jobs by layout",
        "command": " ".join(["python", "benchmarks/layouts.py", *sys.argv[1:]]),
        **provenance(),
        "arms": list(ARMS),
        "collectives": [row for ranks in given.ranks for row in measure_collectives(ranks, given.sizes, given.calls)],
        "steps": measure_steps(given.layouts, given.steps, given.repeats),
    }
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    else:
        save("layouts", record)


if __name__ == "__main__":
    main()
