"""The matrix of layouts and the reference workload's own layout, put on record; docs/topology.md shows both.

    .venv/bin/python benchmarks/topology.py matrix --file recipes/topology-full.toml --folder runs/matrix-full
    .venv/bin/python benchmarks/topology.py reference --steps 200 --folder runs/reference-layout
    .venv/bin/python benchmarks/topology.py gpu --folder runs/matrix-gpu --commit HASH
    .venv/bin/python benchmarks/topology.py docs

write benchmarks/results/topology.json, topology_reference.json, topology_gpu.json (on a machine with a card) and the
tables of docs/topology.md.
What already lies in the folders is taken over, so a call that was interrupted continues.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_timing import origin
from results import ROOT, provenance, save

from samebits.evidence.verify import verify
from samebits.matrix.record import grid

RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/topology.md"
# The layout of the reference workload: a trainer of eight ranks, two engines of four workers each.
REFERENCE = ("--train-tp", "4", "--train-cp", "2", "--rollout-engines", "2", "--rollout-tp", "4")
# Its batch: 16 responses a step, two prompts, so that both engines have work.
BATCH = ("--global-batch-size", "16", "--samples-per-prompt", "8")
# Flags of whole runs on GPUs that the table shows.
SHOWN = (
    "case",
    "temperature",
    "top-",
    "min-p",
    "model",
    "reference-checkpoint",
    "train-",
    "rollout-",
    "no-rollout-",
    "weight-transfer",
)
ARMS_SHOWN = ("train-tp", "train-cp", "case", "attention-case", "ffn-case", "logp-case")


def samebits(*words: str) -> int:
    """`samebits` in the Python of this process; its exit code."""
    return subprocess.run([sys.executable, "-m", "samebits.cli.main", *words], check=False).returncode


def run_matrix(file: Path, folder: Path, name: str, made: dict[str, object]) -> None:
    """Runs the matrix and saves its record, with where it was made."""
    code = samebits("run", "--matrix", str(file), "--matrix-dir", str(folder))
    if code not in (0, 1):
        sys.exit(f"the matrix ended with {code}: call again, what is done is taken over")
    record = json.loads((folder / "matrix.json").read_text())
    command = f"samebits run --matrix {file.as_posix()}"
    # where the model lay is of no interest elsewhere; its shape is in the record
    job = {key: value for key, value in record["job"].items() if key != "model"}
    save(name, {"command": command, **made, **record, "job": job})


def run_reference(steps: int, folder: Path) -> None:
    """Runs the reference layout and saves what `verify` recomputes from the raw bits."""
    words = ("run", *REFERENCE, *BATCH, "--num-rollout", str(steps), "--eval-interval", "0")
    if not (folder / "seal.json").exists():
        samebits(*words, "--run-dir", str(folder))
    found = verify(folder)
    summary = json.loads((folder / "summary.json").read_text())
    names = ("steps", "compared_tokens", "mismatch_count", "max_abs_diff")
    record = {
        "what": "the reference workload's layout: trainer TP4 x CP2 (8 ranks), two engines of TP4 (8 workers)",
        "command": " ".join(["samebits", *words]),
        **provenance(),
        "verdict": found.verdict.value,
        "problems": list(found.problems),
        **{name: summary[name] for name in names},
        "processes": sorted(path.stem for path in (folder / "routes").iterdir()),
    }
    save("topology_reference", record)
    print(f"{record['verdict']}: {record['mismatch_count']} of {record['compared_tokens']} differ")


def tables() -> dict[str, str]:
    """The generated parts of the page, by name, from the committed records."""
    makers = {
        "matrix": ("topology", _matrix),
        "cards": ("topology_gpu", _matrix),
        "reference": ("topology_reference", _reference),
        "arms": ("reference_workload_cpu", _arms),
        "collectives": ("layouts", _collectives),
        "steps": ("layouts", _steps),
        "runs": ("gpu_main_job", _runs),
    }
    return {
        name: made(json.loads((RESULTS / f"{record}.json").read_text()))
        for name, (record, made) in makers.items()
        if (RESULTS / f"{record}.json").exists()
    }


def _matrix(record: dict[str, Any]) -> str:
    tokens = sum(pair.get("compared_tokens", 0) for pair in record["pairs"])
    return (
        f"`{record['command']}`: **{record['verdict']}** in {len(record['pairs'])} pairs, {tokens:,} comparisons; "
        f"{len({pair.get('logp') for pair in record['pairs']})} digest of all tokens and log-probabilities. A cell "
        f"counts the tokens whose two log-probabilities differ in any bit.\n\n{grid(record)}"
    )


def _reference(record: dict[str, Any]) -> str:
    return (
        f"`{record['command']}`: **{record['verdict']}**, {record['mismatch_count']:,} of "
        f"{record['compared_tokens']:,} log-probabilities differ over {record['steps']} steps, "
        f"{len(record['processes'])} processes with a route record each.\n"
    )


def _arms(record: dict[str, Any]) -> str:
    lines = ["| arm | flags | steps | log-probabilities | differ | largest difference |", "| --- |" + " --- |" * 5]
    for arm in record["records"]:
        flags = [f"--{flag.strip()}" for flag in arm["command"].split("--")[1:] if flag.startswith(ARMS_SHOWN)]
        compared, differ = (
            sum(step[name] for step in arm["by_step"]) for name in ("compared_tokens", "mismatch_count")
        )
        largest = max(step["max_abs_diff"] for step in arm["by_step"])
        lines.append(
            f"| {arm['arm']} | `{' '.join(flags)}` | {arm['steps']} | {compared:,} | {differ:,} | {largest:.2g} |"
        )
    return "\n".join(lines) + "\n"


def _collectives(record: dict[str, Any]) -> str:
    native, *strict = record["arms"]
    lines = [
        f"| call | ranks | KiB per rank | {native}, us | {' | '.join(f'{arm}, us' for arm in strict)} |",
        "| --- | --- | --- | --- |" + " --- |" * len(strict),
    ]
    for row in sorted(record["collectives"], key=lambda row: (row["operation"], row["ranks"], row["kib"])):
        cells = [f"{row[arm]:,.0f} ({row[native] / row[arm]:.2f})" for arm in strict]
        head = f"{row['operation']} | {row['ranks']} | {row['kib']} | {row[native]:,.0f}"
        lines.append(f"| {head} | {' | '.join(cells)} |")
    return _measured(record) + "\n".join(lines) + "\n"


def _steps(record: dict[str, Any]) -> str:
    lines = ["| layout | flags | seconds a step |", "| --- | --- | --- |"]
    for row in record["steps"]:
        lines.append(f"| {row['layout']} | `{' '.join(row['settings'])}` | {row['seconds_per_step']:.2f} |")
    return "\n".join(lines).replace("``", "") + "\n"


def _runs(record: dict[str, Any]) -> str:
    lines = [
        "| cards | flags of model and layouts | steps | log-probabilities | differ | commit |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for run in record["records"]:
        flags = [f"--{flag.strip()}" for flag in run["command"].split("--")[1:] if flag.startswith(SHOWN)]
        head = f"{len(run['platform']['cards'])} | `{' '.join(flags)}`"
        tail = f"{run['compared_tokens']:,} | {run['mismatch_count']} | `{run['commit'][:8]}`"
        lines.append(f"| {head} | {run['steps']} | {tail} |")
    return "\n".join(lines).replace("``", "") + "\n"


def _measured(record: dict[str, Any]) -> str:
    machine = record["machine"]
    return (
        f"`{record['command']}` on {machine['cores']} cores ({machine['processor']}, {machine['instruction_set']}), "
        f"torch {record['versions']['torch']}, commit `{record['commit'][:12]}`:\n\n"
    )


def page(text: str) -> str:
    """The page with its generated parts made anew."""
    for name, table in tables().items():
        begin, end = f"<!-- {name}: made by benchmarks/topology.py -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}{table}{end}{after}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["matrix", "reference", "gpu", "docs"])
    parser.add_argument("--file", type=Path)
    parser.add_argument("--commit", help="of the code that runs, where the machine has no repository")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    if given.what == "matrix":
        file = given.file or Path("recipes/topology-full.toml")
        run_matrix(file, given.folder or Path("runs/matrix-full"), "topology", provenance())
    elif given.what == "gpu":
        file = given.file or Path("recipes/topology-gpu.toml")
        run_matrix(file, given.folder or Path("runs/matrix-gpu"), "topology_gpu", origin(given.commit))
    elif given.what == "reference":
        run_reference(given.steps, given.folder or Path("runs/reference-layout"))
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
