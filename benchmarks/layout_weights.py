"""One training job in many trainer layouts: do the final weights have the same bits, and what does that cost?

    .venv/bin/python benchmarks/layout_weights.py --steps 20

trains the default preset's model on fixed samples, each layout with and without --strict-gradients, and writes
benchmarks/results/layout_weights.json and the table in docs/megatron.md. `--only NAME` runs one layout and keeps the
others.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import layout_training
from results import ROOT, provenance, save

from samebits.testing.ranks import run_ranks

PAGE = ROOT / "docs/megatron.md"
BEGIN, END = "<!-- layouts: begin -->", "<!-- layouts: end -->"
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "small micro-batches": {"max_tokens_per_gpu": 100},
    "tp 2": {"tp": 2},
    "tp 4, sequence parallel": {"tp": 4, "sequence_parallel": True},
    "cp 2": {"cp": 2},
    "cp 2, allgather": {"cp": 2, "cp_layout": "allgather"},
    "pp 2, vpp 2": {"pp": 2, "vpp": 2},
    "dp 4": {"dp": 4},
    "tp 2, cp 2": {"tp": 2, "cp": 2},
    "pp 2, dp 2": {"pp": 2, "dp": 2},
}


def run(layout: dict[str, Any], steps: int) -> dict[str, Any]:
    settings = {"max_tokens_per_gpu": 400, **layout}
    world = math.prod(layout.get(name, 1) for name in ("tp", "cp", "pp", "dp"))
    with TemporaryDirectory() as folder:
        arguments = json.dumps(settings), str(steps), folder
        ranks = run_ranks(layout_training.__file__, "train", world, Path(folder), *arguments)
    found: dict[str, Any] = {"ranks": world}
    for kind in ("strict", "default"):
        found[kind] = {
            "weights": bytes(ranks[0][f"{kind}/digest"].tolist()).decode(),
            "norms": [norm.hex() for norm in ranks[0][f"{kind}/norms"].tolist()],
            "cpu_seconds": float(sum(rank[f"{kind}/seconds"].median() for rank in ranks)),
        }
    return found


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    layouts = record["layouts"]
    single = layouts["one rank"]
    lines = [
        f"SHA-256 over the weights after {record['steps']} steps (first 12 digits). Cost: CPU seconds of a step, all",
        "ranks together, as a multiple of those without `--strict-gradients`, on a machine that had other work.",
        f"`benchmarks/layout_weights.py --steps {record['steps']}`, record in",
        "`benchmarks/results/layout_weights.json`:",
        "",
        "| layout | ranks | strict | default | norms of all steps as on one rank | cost of strict |",
        "| --- | ---: | --- | --- | --- | ---: |",
    ]
    for name, found in layouts.items():
        strict, default = found["strict"], found["default"]
        same = ["same" if found[k]["norms"] == single[k]["norms"] else "other" for k in ("strict", "default")]
        cost = strict["cpu_seconds"] / default["cpu_seconds"]
        lines.append(
            f"| {name} | {found['ranks']} | `{strict['weights'][:12]}` | `{default['weights'][:12]}` "
            f"| strict: {same[0]}, default: {same[1]} | {cost:.2f} |"
        )
    return "\n".join(lines)


def write_page(record: dict[str, Any]) -> None:
    """Put the table into its place in the documentation."""
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(record)}\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=LAYOUTS, action="append")
    arguments = parser.parse_args()
    target = ROOT / "benchmarks/results/layout_weights.json"
    old = json.loads(target.read_text()) if target.is_file() and arguments.only else {"layouts": {}}
    found = old["layouts"]
    for name in arguments.only or LAYOUTS:
        found[name] = run(LAYOUTS[name], arguments.steps)
        record = {
            "what": "final weights by trainer layout",
            **provenance(),
            "steps": arguments.steps,
            "layouts": {key: found[key] for key in LAYOUTS if key in found},
        }
        save("layout_weights", record)
        print(name, found[name]["strict"]["weights"][:12], found[name]["default"]["weights"][:12], flush=True)
    if "one rank" in found:
        write_page(record)


if __name__ == "__main__":
    main()
