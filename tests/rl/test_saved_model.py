"""The model that a run keeps: the weights that were published, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from samebits.bits import tree_digests
from samebits.rl.protocols import RunFailed
from samebits.rl.publication import version_of
from samebits.rl.saved_model import save_model

WEIGHTS = {"model.norm.weight": torch.arange(8).bfloat16()}


class Trainer:
    def __init__(self, **weights: torch.Tensor) -> None:
        self._weights = weights

    def save(self, path: str) -> None:
        save_file(self._weights, Path(path) / "model.safetensors")


def keep(folder: Path, trainer: Any) -> dict[str, Any]:
    source = folder / "source"
    source.mkdir()
    for name in ("config.json", "tokenizer.json", "recipe.json", "model.safetensors.index.json", "model.safetensors"):
        (source / name).write_text(name)
    return save_model(trainer, version_of(3, tree_digests(WEIGHTS)), source, folder / "model")


def test_what_is_kept(tmp_path: Path) -> None:
    saved = keep(tmp_path, Trainer(**WEIGHTS))
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == sorted(saved["files"]) == names
    assert (saved["version"], saved["digest"]) == (3, version_of(3, tree_digests(WEIGHTS)).digest)


def test_other_weights_than_the_published_ones_are_not_kept(tmp_path: Path) -> None:
    other = WEIGHTS["model.norm.weight"].clone()
    other.view(torch.int16)[5] ^= 1
    with pytest.raises(RunFailed, match="do not hold the weights of version 3"):
        keep(tmp_path, Trainer(**{"model.norm.weight": other}))
    assert not (tmp_path / "model").exists()
