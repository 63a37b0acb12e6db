"""What a run reads: model and problem files, found, checked and fingerprinted before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits import contract
from samebits.evidence.store import sha256_file
from samebits.rl.config import RunConfig
from samebits.timeline.events import parse_json

PRESETS = Path(__file__).parent.parent / "presets"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Resolved paths of a run's inputs."""

    model: Path
    reference: Path
    prompts: Path
    held_out: Path | None

    def fingerprints(self) -> dict[str, Any]:
        """Per input, its path and the sha256 of each of its files."""
        places = {
            "model": self.model,
            "reference": self.reference,
            "prompts": self.prompts,
            "held_out": self.held_out,
        }
        files = {path: _files(path) for path in places.values() if path}
        digests = file_digests({file for held in files.values() for file in held})
        return {
            key: {"path": str(path), "files": {file.name: digests[file] for file in files[path]}} if path else None
            for key, path in places.items()
        }


def resolve_inputs(config: RunConfig) -> Inputs:
    """Finds every input. Raises ValueError that names the one that is missing and what it must hold."""
    model = _model(config.model, "model")
    reference = config.reference_checkpoint
    return Inputs(
        model=model,
        reference=_model(reference, "reference_checkpoint") if reference else model,
        prompts=_problems(config.prompt_data, "prompt_data", "prompts.jsonl"),
        held_out=_problems(config.eval_data, "eval_data", "eval.jsonl") if config.eval_data else None,
    )


def _preset(value: str, key: str) -> Path | None:
    if not value.startswith("preset:"):
        return None
    path = PRESETS / value.removeprefix("preset:")
    if path.parent != PRESETS or not path.is_dir():
        known = sorted(entry.name for entry in PRESETS.iterdir() if entry.is_dir())
        raise ValueError(f"{key}: no preset {value!r}; known: {', '.join(known)}")
    return path


def _model(value: str, key: str) -> Path:
    return resolve_model(value, key, ("config.json", "tokenizer.json"))


def resolve_model(value: str, key: str, needed: tuple[str, ...] = ("config.json",)) -> Path:
    """The directory of a model: a preset's, or the one named. Raises ValueError for one that lacks a needed file."""
    preset = _preset(value, key)
    path = preset / "model" if preset else Path(value).resolve()
    if not path.is_dir():
        raise ValueError(f"{key}: {value} is not a directory; want a local Hugging Face model directory")
    for name in needed:
        if not (path / name).is_file():
            raise ValueError(f"{key}: {path} has no {name}; want a local Hugging Face model directory")
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"{key}: {path} has no *.safetensors weights")
    read_object(path / "config.json")
    return path


def _problems(value: str, key: str, name: str) -> Path:
    preset = _preset(value, key)
    path = preset / name if preset else Path(value).resolve()
    if not path.is_file():
        raise ValueError(f"{key}: {value} is not a file; want JSONL with a prompt and a label on each line")
    return path


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds one object. Raises ValueError that names the file."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, want a JSON object")
    return content


def stop_ids(model: Path) -> tuple[int, ...]:
    """The end-of-text ids of a model directory: generation_config.json over config.json."""
    for name in ("generation_config.json", "config.json"):
        ids = read_object(model / name).get("eos_token_id") if (model / name).is_file() else None
        if isinstance(ids, int):
            return (ids,)
        if isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids):
            return tuple(ids)
    raise ValueError(f"{model}: no eos_token_id in generation_config.json or config.json")


def model_constants(model: Path, config: RunConfig) -> dict[str, object]:
    """What of the model belongs into the run contract, besides its weights."""
    sampling = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return {**contract.model_constants(read_object(model / "config.json")), **sampling}


def _files(path: Path) -> list[Path]:
    return [file for file in sorted(path.glob("*")) if file.is_file()] if path.is_dir() else [path]


def file_digests(files: Iterable[Path]) -> dict[Path, str]:
    """The sha256 of each of these files."""
    files = list(files)
    # a core reads about a GB/s: the parts of large checkpoints are hashed side by side
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(files, pool.map(sha256_file, files), strict=True))
