"""What a matrix file asks for: a job, trainer layouts, rollout layouts, and the pairs of them to compare.

    form = "score"                # each layout once, on the same tokens; or "train": one whole run for each pair
    steps = 2                     # optimiser steps of each trainer layout on those tokens (form "score")
    same_weights = true           # weights that are not the first layout's count as a difference too
    pairs = [["tp4", "tp2"]]      # trainer, rollout; all combinations where it is left out

    [job]                         # settings of `samebits run` that all layouts share
    [model]                       # entries of config.json: a small random model of this shape instead of the job's
    [trainer.tp4]                 # settings of one trainer layout: train_... and how it cuts the batch
    [rollout.tp2]                 # settings of one rollout layout: rollout_...

The first layout of each side is the one that all others are compared to.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from samebits.rl.config import RunConfig, load_config

Side = Literal["trainer", "rollout"]
SIDES: tuple[Side, Side] = ("trainer", "rollout")
FORMS = ("score", "train")
_KEYS = ("form", "steps", "same_weights", "pairs", "job", "model", *SIDES)
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
# Besides train_... and rollout_...: how a trainer cuts the batch is part of its layout too.
_ALSO = {"trainer": ("max_tokens_per_gpu",), "rollout": ()}
_PREFIX = {"trainer": "train_", "rollout": "rollout_"}


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix, resolved: one RunConfig per layout of each side (the other side as in the job) and per pair."""

    form: str
    steps: int
    same_weights: bool
    model: Mapping[str, Any]
    job: Mapping[str, Any]
    layouts: Mapping[Side, Mapping[str, Mapping[str, Any]]]
    pairs: tuple[tuple[str, str], ...]

    def config(self, trainer: str | None, rollout: str | None, **changes: Any) -> RunConfig:
        """The settings of one layout (the other side is then a single process) or of one pair. Raises ValueError."""
        chosen = [self.layouts[side][name] for side, name in zip(SIDES, (trainer, rollout), strict=True) if name]
        settings = {**self.job, "max_tp": self.max_tp, **changes}
        for one in chosen:
            settings |= one
        try:
            return load_config(settings)
        except ValueError as error:
            names = [name for name in (trainer, rollout) if name]
            raise ValueError(f"{'layout ' + ' with '.join(names) if names else '[job]'}: {error}") from error

    @property
    def max_tp(self) -> int:
        """K segments for all layouts alike: those that the job asks for, or the largest tensor parallelism."""
        tables = self.job, *(one for side in SIDES for one in self.layouts[side].values())
        given = [one.get(f"{prefix}tp") for one in tables for prefix in _PREFIX.values()]
        largest = max((size for size in given if isinstance(size, int)), default=1)
        # A size that is no power of two is refused where it stands, in its layout.
        wanted: int = self.job.get("max_tp") or 1 << (largest - 1).bit_length()
        return wanted


def read_matrix(file: Path, flags: Mapping[str, Any]) -> Matrix:
    """Reads a matrix file; `flags` override its job. Raises ValueError that names the table and the key."""
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the matrix {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid TOML: {error}") from error
    unknown = sorted(set(data) - set(_KEYS))
    if unknown:
        raise ValueError(f"{file}: unknown key {unknown[0]!r}; known: {', '.join(_KEYS)}")
    _check_types(data, file)
    layouts = {side: _layouts(data, side, file) for side in SIDES}
    matrix = Matrix(
        form=data.get("form", "score"),
        steps=data.get("steps", 0),
        same_weights=data.get("same_weights", False),
        model=data.get("model", {}),
        job={**data.get("job", {}), **flags},
        layouts=layouts,
        pairs=_pairs(data, layouts, file),
    )
    _check(matrix, file)
    return matrix


def _check_types(data: Mapping[str, Any], file: Path) -> None:
    for key, kind, name in (
        ("job", dict, "a table"),
        ("model", dict, "a table"),
        ("pairs", list, "a list"),
        ("same_weights", bool, "true or false"),
    ):
        if key in data and not isinstance(data[key], kind):
            raise ValueError(f"{file}: {key} must be {name}, got {data[key]!r}")


def _layouts(data: Mapping[str, Any], side: Side, file: Path) -> dict[str, dict[str, Any]]:
    tables = data.get(side, {})
    if not isinstance(tables, dict) or not tables or not all(isinstance(one, dict) for one in tables.values()):
        raise ValueError(f"{file}: want at least one table [{side}.NAME]")
    for name, settings in tables.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{file}: [{side}.{name}]: want a name of small letters, digits and dashes")
        for key in settings:
            if not key.startswith(_PREFIX[side]) and key not in _ALSO[side]:
                raise ValueError(
                    f"{file}: [{side}.{name}]: {key} is no setting of a {side} layout; "
                    f"want {_PREFIX[side]}... here, and what all layouts share in [job]"
                )
    return tables


def _pairs(
    data: Mapping[str, Any], layouts: Mapping[Side, Mapping[str, Any]], file: Path
) -> tuple[tuple[str, str], ...]:
    every = tuple(itertools.product(layouts["trainer"], layouts["rollout"]))
    given = data.get("pairs")
    if given is None:
        return every
    for pair in given:
        if not isinstance(pair, list) or tuple(pair) not in every:
            raise ValueError(f"{file}: pairs: {pair} is not [trainer layout, rollout layout]")
    pairs = tuple((trainer, rollout) for trainer, rollout in given)
    if not pairs or len(set(pairs)) != len(pairs):
        raise ValueError(f"{file}: pairs: want each pair once, and at least one; leave it out for all of them")
    return pairs


def _check(matrix: Matrix, file: Path) -> None:
    if matrix.form not in FORMS:
        raise ValueError(f"{file}: form must be one of {', '.join(FORMS)}, got {matrix.form!r}")
    if type(matrix.steps) is not int or matrix.steps < 0:
        raise ValueError(f"{file}: steps must be a number from 0 on, got {matrix.steps!r}")
    if matrix.form == "train" and matrix.steps:
        raise ValueError(f"{file}: form train takes num_rollout steps, set in [job]; leave steps out")
    if matrix.form == "score" and matrix.same_weights and not matrix.steps:
        raise ValueError(f"{file}: same_weights compares what steps lead to; give steps, or leave same_weights out")
    job = matrix.config(None, None)
    if job.run_dir is not None or job.tensorboard or job.wandb != "off":
        raise ValueError(f"{file}: a matrix has no run_dir, tensorboard or wandb; --matrix-dir says where records go")
    if matrix.form == "score" and job.replay_tokens is not None:
        raise ValueError(f"{file}: form score draws its own tokens; leave replay_tokens out, or use form train")
    if matrix.form == "score" and job.save_model:
        raise ValueError(f"{file}: form score keeps no model; leave save_model out, or use form train")
    for trainer, rollout in matrix.pairs:
        config = matrix.config(trainer, rollout)
        if matrix.form == "score" and set(config.cases.values()) != {"R/R"}:
            raise ValueError(
                f"{file}: form score needs case R/R: native engines draw other tokens in every layout; use form train"
            )
        if matrix.form == "score" and config.limited:
            raise ValueError(f"{file}: form score knows no top_k, top_p and min_p; leave them out, or use form train")
