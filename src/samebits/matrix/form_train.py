"""Form "train": one whole run for each pair, in a run directory of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samebits.contract import digest_of
from samebits.evidence.sidecar import read_step, sidecar_name
from samebits.evidence.store import SEAL, TIMELINE
from samebits.evidence.verify import verify
from samebits.matrix.plan import Matrix
from samebits.matrix.record import read_finished, write_finished
from samebits.rl.config import RunConfig
from samebits.rl.inputs import Inputs
from samebits.rl.job import Parts, run_job
from samebits.rl.protocols import RunFailed
from samebits.timeline.events import Published
from samebits.timeline.ledger import read

Say = Callable[[str], None]
_UNKNOWN = {"verdict": "cannot tell", "weights": "", "weights_as_reference": True}


def train_pairs(
    matrix: Matrix, folder: Path, parts: Parts, inputs: Inputs, key: str, say: Say
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The record of every pair; the layouts have none of their own in this form."""
    pairs: list[dict[str, Any]] = []
    for trainer, rollout in matrix.pairs:
        run = folder / "runs" / f"{trainer}--{rollout}"
        config = matrix.config(trainer, rollout, run_dir=str(run))
        entry = {"trainer": trainer, "rollout": rollout, **_pair(config, run, parts, key, matrix.same_weights)}
        if entry["verdict"] != "cannot tell":
            entry |= as_reference(entry, pairs)
        pairs.append(entry)
        say(f"{trainer} with {rollout}: {entry['verdict']}, {entry.get('compared_tokens', 0)} tokens")
    return pairs, {
        f"{side} {name}": {"settings": dict(s)} for side in matrix.layouts for name, s in matrix.layouts[side].items()
    }


def _pair(config: RunConfig, run: Path, parts: Parts, key: str, same_weights: bool) -> dict[str, Any]:
    mark, wanted = run.with_suffix(".json"), digest_of([key, config.model_dump()])
    if not (run / SEAL).is_file() or read_finished(mark, wanted) is None:
        shutil.rmtree(run, ignore_errors=True)
        try:
            run_job(config, parts)
        except (RunFailed, ValueError, OSError) as error:
            return {**_UNKNOWN, "problem": str(error)}
        write_finished(mark, wanted, {})
    found = verify(run)
    totals = found.totals
    if found.problems:
        return {**_UNKNOWN, "problem": "; ".join(found.problems)}
    weights = [event.digest for event in read(run / TIMELINE).events if isinstance(event, Published)]
    return {
        "verdict": found.verdict.value,
        "compared_tokens": totals["compared_tokens"],
        "mismatch_count": totals["mismatch_count"],
        "max_abs_diff": totals["max_abs_diff"],
        "seconds_per_step": totals["seconds_per_step"],
        # After an update, other weights may be expected; before it, all layouts work with the same ones.
        "logp": logp_digest(run, config.num_rollout if same_weights else 1),
        "weights": weights[-1],
    }


def logp_digest(run: Path, steps: int) -> str:
    """The name of all tokens and both sides' log-probability bits, over the first steps of a run."""
    samples = (sample for step in range(1, steps + 1) for sample in read_step(run / sidecar_name(step)))
    return digest_of([[s.key, list(s.token_ids), list(s.rollout_bits), list(s.trainer_bits)] for s in samples])


def as_reference(entry: dict[str, Any], before: list[dict[str, Any]]) -> dict[str, bool]:
    """Whether this pair gave what the first pair gave that came to its end."""
    first = next((pair for pair in before if "logp" in pair), entry)
    return {
        "logp_as_reference": entry["logp"] == first["logp"],
        "weights_as_reference": entry["weights"] == first["weights"],
    }
