"""Running a matrix: refuse what can't work, do what isn't done yet, compare, put it on record."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import samebits
from samebits.contract import digest_of
from samebits.evidence.verdict import Verdict
from samebits.matrix.form_score import score_pairs
from samebits.matrix.form_train import train_pairs
from samebits.matrix.layouts import requests_of
from samebits.matrix.model import write_model
from samebits.matrix.plan import Matrix
from samebits.matrix.record import HOW, RECORD, SCHEMA, TABLE, markdown, write_json
from samebits.rl.inputs import Inputs, resolve_inputs
from samebits.rl.job import Parts, describe

Say = Callable[[str], None]


def run_matrix(matrix: Matrix, folder: Path, parts: Parts, say: Say = lambda line: None) -> dict[str, Any]:
    """Runs what `folder` doesn't hold yet and returns the record, which is written there as JSON and Markdown.

    Raises ValueError before anything starts when a layout can't work, OSError when nothing can be written. A layout
    that fails later costs its pairs their verdict ("cannot tell"); the others are still compared.
    """
    if matrix.model:
        base = resolve_inputs(matrix.config(None, None)).model
        model = write_model(folder / "model", matrix.model, base)
        matrix = replace(matrix, job={**matrix.job, "model": str(model)})
    config = matrix.config(None, None)
    inputs = resolve_inputs(config)
    contract = parts.contract(config, inputs)
    refuse_what_cannot_work(matrix, inputs, parts, folder)
    key = digest_of({"contract": contract.as_data(), "code": code_digest(), "inputs": inputs.fingerprints()})
    pairs, layouts = (score_pairs if matrix.form == "score" else train_pairs)(matrix, folder, parts, inputs, key, say)
    record = {
        "schema": SCHEMA,
        "form": matrix.form,
        "how": HOW[matrix.form],
        "verdict": overall(pairs, matrix.same_weights).value,
        "max_tp": matrix.max_tp,
        "contract": contract.digest(),
        "job": dict(matrix.job),
        "model": dict(matrix.model),
        "steps": matrix.steps,
        "same_weights": matrix.same_weights,
        "layouts": layouts,
        "pairs": pairs,
        **{name: describe(config, inputs, contract)[name] for name in ("packages", "platform")},
        "code": code_digest(),
    }
    write_json(folder / RECORD, record)
    (folder / TABLE).write_text(markdown(record), encoding="utf-8")
    return record


def refuse_what_cannot_work(matrix: Matrix, inputs: Inputs, parts: Parts, folder: Path) -> None:
    """Raise ValueError for unreadable problems, or with the rule that a layout breaks; nothing has been started."""
    requests_of(matrix.config(None, None), inputs)
    for trainer, rollout in matrix.pairs:
        config = matrix.config(trainer, rollout)
        contract = parts.contract(config, inputs)
        try:
            parts.engine_arguments(config, inputs, contract, 0)
            parts.trainer_arguments(config, inputs, contract, 0, folder)
        except ValueError as error:
            raise ValueError(f"pair {trainer} with {rollout}: {error}") from error


def overall(pairs: list[dict[str, Any]], same_weights: bool) -> Verdict:
    """Different as soon as one pair is, or is not as the reference; cannot tell if any pair could not be compared."""
    verdicts = {pair["verdict"] for pair in pairs}
    as_reference = all(
        pair["logp_as_reference"] and (pair["weights_as_reference"] or not same_weights)
        for pair in pairs
        if pair["verdict"] != Verdict.CANNOT_TELL.value
    )
    if Verdict.DIFFERENT.value in verdicts or not as_reference:
        return Verdict.DIFFERENT
    return Verdict.SAME if verdicts == {Verdict.SAME.value} else Verdict.CANNOT_TELL


def code_digest() -> str:
    """The name of the installed code: results of other code are not taken over."""
    root = Path(samebits.__file__).parent
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    # Of an editable installation, the compiled kernels lie elsewhere.
    kernels = find_spec("samebits._cpu")
    if kernels is not None and kernels.origin is not None:
        files["_cpu"] = Path(kernels.origin)
    return digest_of({name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()})
