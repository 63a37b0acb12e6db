"""The small random model of a matrix, in the directory where its records go."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samebits.testing.tiny_models import write_tiny_model

# What a tokenizer and a chat template consist of; everything else belongs to the base model's own weights.
_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write_model(folder: Path, shape: Mapping[str, Any], base: Path) -> Path:
    """A model of this shape with random weights and the tokenizer of `base`; the same bytes every time.

    `shape` overrides entries of config.json; `architecture` and `seed` choose the architecture and the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in _TEXT_FILES:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    return write_tiny_model(folder, **shape)
