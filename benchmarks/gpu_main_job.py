"""What whole runs on a GPU came to: `python benchmarks/gpu_main_job.py --commit HASH RUN_DIR...` collects sealed runs.

Each is verified again from its records and added to those on record. The runs themselves are made by
`samebits run --device cuda`; their settings, as flags that reproduce them, are in the record.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from results import ROOT, events_of, save

from samebits.evidence.verify import verify
from samebits.rl.config import RunConfig

KEPT = ("steps", "compared_tokens", "mismatch_count", "max_abs_diff", "tokens_per_second", "seconds_by_phase")


def command(settings: dict[str, Any]) -> str:
    """The flags in which a run's settings differ from the defaults."""
    words = ["samebits run"]
    for name, field in RunConfig.model_fields.items():
        value, flag = settings.get(name, field.default), name.replace("_", "-")
        if value in (field.default, None) or name == "run_dir":
            continue
        value = Path(value).name if isinstance(value, str) and value.startswith("/") else value
        words.append(f"--{flag}" if value is True else f"--no-{flag}" if value is False else f"--{flag} {value}")
    return " ".join(words)


def collected(run: Path) -> dict[str, Any]:
    manifest = json.loads((run / "manifest.json").read_text())
    events = events_of(run)
    routes = [json.loads(path.read_text()) for path in sorted((run / "routes").glob("*.json"))]
    found = verify(run)
    summary = json.loads((run / "summary.json").read_text())
    return {
        "command": command(manifest["config"]),
        "verdict": found.verdict.value,
        "problems": list(found.problems),
        **{name: summary[name] for name in KEPT},
        "contract": manifest["contract"]["digest"],
        "arithmetic": manifest["contract"]["content"]["arithmetic"],
        "weights": {event["version"]: event["digest"] for event in events if event["kind"] == "published"},
        "by_step": [
            {name: event[name] for name in ("step", "compared_tokens", "mismatch_count", "max_abs_diff")}
            for event in events
            if event["kind"] == "compared"
        ],
        "packages": manifest["packages"],
        "platform": manifest["platform"],
        "source": manifest["source"],
        "processes": [
            {
                name: route.get(name)
                for name in ("role", "mode", "device", "card", "bus", "instruction_set", "kernels", "counters")
            }
            for route in routes
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--note", default="", help="what a reader must know besides")
    parser.add_argument("runs", nargs="+", type=Path)
    given = parser.parse_args()
    before = json.loads((ROOT / "benchmarks/results/gpu_main_job.json").read_text())["records"]
    records = [{"commit": given.commit, "note": given.note, **collected(run)} for run in given.runs]
    for record in records:
        print(record["verdict"], record["compared_tokens"], record["mismatch_count"], record["command"])
    save("gpu_main_job", {"records": [*before, *records]})


if __name__ == "__main__":
    main()
