"""Does the policy learn, and do the bits stay equal while it does? Several seeds of the same long run.

    .venv/bin/python benchmarks/learning.py --seeds 1 2 3 --steps 200

runs `samebits run` once per seed (R/R), then writes benchmarks/results/learning.json and docs/images/learning.svg.
`--name tp2 --seeds 1 --tp 2` does the same with two ranks on both sides and writes tp2.json and tp2.svg.
A run directory that is already there and sealed is read instead of run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from results import ROOT, events_of, provenance, save

from samebits.evidence.verify import verify


def run(seed: int, steps: int, tp: int, folder: Path) -> dict[str, object]:
    """One run: its accuracy by step and its verdict, which `verify` recomputes from the raw bits."""
    directory = folder / f"seed{seed}"
    if not (directory / "seal.json").exists():
        command = [
            str(Path(sys.executable).parent / "samebits"), "run", "--run-dir", str(directory),
            "--seed", str(seed), "--rollout-seed", str(seed), "--num-rollout", str(steps),
            "--eval-interval", "20", "--eval-prompts", "250", "--train-tp", str(tp), "--rollout-tp", str(tp),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=sys.stderr)
    found = verify(directory)
    summary = json.loads((directory / "summary.json").read_text())
    events = events_of(directory)
    return {
        "seed": seed,
        "verdict": found.verdict.value,
        "steps": summary["steps"],
        "compared_tokens": summary["compared_tokens"],
        "mismatch_count": summary["mismatch_count"],
        "max_abs_diff": summary["max_abs_diff"],
        "seconds_per_step": summary["seconds_per_step"],
        "accuracy": [[e["step"], e["accuracy"]] for e in events if e["kind"] == "evaluated"],
    }


def draw(runs: list[dict], target: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "samebits"  # the same picture for the same numbers
    figure, axes = pyplot.subplots(figsize=(6.4, 3.4), layout="constrained")
    for one in runs:
        axes.plot(*zip(*one["accuracy"], strict=True), marker="o", markersize=3, label=f"seed {one['seed']}")
    axes.axhline(0.6, color="grey", linewidth=0.8, linestyle=":")
    axes.axhline(0.85, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="step", ylabel="held-out accuracy (sampled)", ylim=(0, 1))
    axes.legend(loc="lower right")
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of each side")
    parser.add_argument("--name", default="learning")
    arguments = parser.parse_args()
    folder = ROOT / "runs" / arguments.name
    runs = [run(seed, arguments.steps, arguments.tp, folder) for seed in arguments.seeds]
    record = {"what": arguments.name, **provenance(), "tp": arguments.tp, "runs": runs}
    save(arguments.name, record)
    (ROOT / "docs/images").mkdir(parents=True, exist_ok=True)
    draw(runs, ROOT / f"docs/images/{arguments.name}.svg")
    for one in runs:
        first, last = one["accuracy"][0][1], one["accuracy"][-1][1]
        print(f"seed {one['seed']}: accuracy {first:.3f} -> {last:.3f}, {one['mismatch_count']} mismatches", flush=True)


if __name__ == "__main__":
    main()
