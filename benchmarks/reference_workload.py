"""The reference workload at the sizes of Qwen3-8B, on two, four or eight GPUs: whole jobs on either route, by arms.

    python benchmarks/random_models.py 8b MODEL 3
    python benchmarks/random_models.py 8b REFERENCE 4
    python benchmarks/reference_workload.py --commit HASH --model MODEL --reference REFERENCE --folder FOLDER
        [--steps 4] [--budget SECONDS] [--arms NAME ...]

writes benchmarks/results/reference_workload.json after every arm, and leaves out arms that it holds already, so that
short calls add up; no arm begins that may not end within the budget. Timelines, manifests and summaries of the bundles,
without the machine's folders, lie in the directory of that name beside it. One prompt, eight samples, responses of
7,168 tokens, KL coefficient 0.001, seeds 1234, two engines. R/R trains with tensor and context parallelism. Native
attention has no context parallelism here, so all other arms have tensor parallelism alone; on two GPUs all have, as a
context-parallel rank would hold the whole optimizer. All arms produce the tokens of the first again, for equal lengths,
R/R once more among them: engines that are given their tokens take other time. Module arms are short, two steps of a
seventh of the length, and have a first arm of their own. A random model earns no reward: the KL term's reference,
another one, moves its weights.

Without GPUs, `random_models.py tiny` for both models and `--device cpu --cards 8 --length 64 --steps 4` run all arms
in the layout of eight, for their bits, and write reference_workload_cpu.json.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_timing import origin
from results import ROOT, events_of, provenance, save

from samebits.contract.routes import MODULES
from samebits.evidence.store import SEAL, TIMELINE
from samebits.evidence.verify import verify

NAME = "reference_workload"
# The published figures of the workload that this one follows: 200 steps on eight MI300X; the arms' lengths differed.
PUBLISHED = {"seconds_per_step": {"P/P": 84.52, "R/R": 99.21}, "tokens_per_gpu_s": {"P/P": 93.79, "R/R": 72.60}}
WARM_UP = 1
SHORTER = 7  # so many times shorter are the responses of short arms


@dataclass(frozen=True)
class Arm:
    """One job: its name, flags of its own, and whether it takes fewer steps and tokens."""

    name: str
    flags: tuple[str, ...]
    short: bool = False


def arms(cards: int, device: str) -> list[Arm]:
    """R/R in the workload's own layout, both routes in the layout that native attention has, the module arms."""
    wide = ("--train-tp", str(cards))
    own = ("--train-tp", str(cards // 2), "--train-cp", "2") if cards > 2 else wide
    compiled = ("--native-compile",) if device == "cuda" else ()
    found = [Arm("R/R", own), Arm("P/P", (*wide, "--case", "P/P", *compiled))]
    found.append(Arm("R/R replayed" if own == wide else "R/R without CP", wide))
    for number in reversed(range(2 ** len(MODULES))):
        strict = [name for at, name in enumerate(MODULES) if number >> at & 1]
        cases = [word for name in MODULES for word in (f"--{name}-case", "R/R" if name in strict else "P/P")]
        flags = (*wide, *cases, *(() if strict else compiled))
        found.append(Arm(f"modules: {'+'.join(strict) or 'none'}", flags, short=True))
    return found


def settings(given: argparse.Namespace, short: bool) -> list[str]:
    """The flags that all arms of one length share."""
    steps, length = (min(given.steps, WARM_UP + 1), given.length // SHORTER) if short else (given.steps, given.length)
    half = str(given.cards // 2)
    cuda = ["--weight-transfer", "cuda_ipc", "--train-transport", "peer_memory", "--kv-cache-gib", "5"]
    if given.cards == 2:
        cuda += ["--train-optimizer-offload", "1.0"]  # each card holds half of the trainer and an engine
    return [
        "--device", given.device, *(cuda if given.device == "cuda" else []), "--model", str(given.model),
        *(["--reference-checkpoint", str(given.reference)] if given.reference else []),
        "--samples-per-prompt", "8", "--global-batch-size", "8", "--max-response-length", str(length),
        "--kl-coef", "0.001", "--lr", "1e-6", "--seed", "1234", "--rollout-seed", "1234", "--eval-interval", "0",
        "--train-recompute", "--max-tokens-per-gpu", "8192", "--rollout-engines", "2", "--rollout-tp", half,
        "--max-tp", str(given.cards), "--num-rollout", str(steps),
    ]  # fmt: skip


def run_arm(arm: Arm, given: argparse.Namespace, folder: Path, first: Path | None) -> dict[str, Any]:
    """What one job came to. RuntimeError where it gave no verdict."""
    again = ["--replay-tokens", str(first)] if first else []
    words = ["run", *settings(given, arm.short), *arm.flags, *again]
    began = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)  # of a call that was cut off
    command = [sys.executable, "-m", "samebits.cli.main", *words, "--run-dir", str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{arm.name} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = verify(folder)
    events = events_of(folder)
    timed = [e for e in events if e["kind"] == "timed"]
    warm = timed[WARM_UP:] or timed
    seconds = [sum(step["seconds"].values()) for step in warm]
    return {
        "arm": arm.name,
        "command": " ".join(map(_name, ["samebits", *words])),
        "manifest_sha256": json.loads((folder / SEAL).read_text())["manifest_sha256"],
        "verdict": found.verdict.value,
        "problems": list(found.problems),
        "steps": len(timed),
        "by_step": [
            {key: e[key] for key in ("step", "compared_tokens", "mismatch_count", "max_abs_diff")}
            for e in events
            if e["kind"] == "compared"
        ],
        "short": arm.short,
        "measured_steps": len(warm),
        "phases": [step["seconds"] for step in timed],
        "generated_tokens": [step["generated_tokens"] for step in timed],
        "seconds_per_step": sum(seconds) / len(seconds),
        "tokens_per_gpu_s": sum(step["generated_tokens"] for step in warm) / sum(seconds) / given.cards,
        "seconds_in_all": time.monotonic() - began,
    }


def keep_evidence(folder: Path, target: Path) -> None:
    """Copy a bundle's timeline, manifest and summary, the last two with paths cut to names; the seal is of the manifest
    as it was written."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / TIMELINE, target)
    for name in ("manifest.json", "summary.json"):
        held = _names(json.loads((folder / name).read_text(encoding="utf-8")))
        (target / name).write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


def _names(held: Any) -> Any:
    """The same data with the last part of every absolute path."""
    if isinstance(held, dict):
        return {_name(key): _names(value) for key, value in held.items()}
    if isinstance(held, list):
        return [_names(value) for value in held]
    return _name(held) if isinstance(held, str) else held


def _name(word: str) -> str:
    return Path(word).name if word.startswith("/") else word


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--reference", type=Path, help="model of the KL term; the first weights where none is given")
    parser.add_argument("--folder", type=Path, required=True, help="for the run directories")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--cards", type=int, help="where it is not as many as there are")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--length", type=int, default=7168)
    parser.add_argument("--budget", type=float, default=86400.0, help="seconds for all arms of this call")
    parser.add_argument("--arms", nargs="+", help="only these; the first of its length before others")
    given = parser.parse_args()
    if given.cards is None:
        import torch

        given.cards = torch.cuda.device_count()
    name = NAME if given.device == "cuda" else f"{NAME}_cpu"
    target = ROOT / f"benchmarks/results/{name}.json"
    about = {"origin": origin(given.commit)} if given.device == "cuda" else provenance()
    held = json.loads(target.read_text())["records"] if target.is_file() else []
    longest, end = 0.0, time.monotonic() + given.budget
    everything = arms(given.cards, given.device)
    names = [arm.name for arm in everything]
    if unknown := sorted(set(given.arms or ()) - set(names)):
        parser.error(f"--arms: no arm is called {', '.join(unknown)}; there are {', '.join(names)}")
    for number, arm in enumerate(everything):
        if given.arms and arm.name not in given.arms:
            continue
        folder = given.folder / str(number)
        source = given.folder / str([other.short for other in everything].index(arm.short))
        # the first arm's tokens must be here for all others
        if any(record["arm"] == arm.name for record in held) and (folder != source or (folder / SEAL).is_file()):
            continue
        if time.monotonic() + longest > end:
            print(f"no time is left for {arm.name}: call again")
            break
        record = run_arm(arm, given, folder, None if folder == source else source)
        record |= {"commit": given.commit, "cards": given.cards, "device": given.device}
        if given.device == "cuda":
            keep_evidence(folder, target.with_suffix("") / re.sub(r"\W+", "-", arm.name))
        longest = max(longest, record["seconds_in_all"])
        print(f"{arm.name}: {record['verdict']}, {record['seconds_per_step']:.2f} s a step", flush=True)
        held = [other for other in held if other["arm"] != arm.name] + [record]
        held.sort(key=lambda r: names.index(r["arm"]))
        save(name, {**about, "published": PUBLISHED, "records": held})


if __name__ == "__main__":
    main()
