"""The trained model as a Hugging Face directory, and what the manifest says of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from samebits.bits import tree_digests
from samebits.rl.inputs import file_digests
from samebits.rl.protocols import RunFailed, TrainerSide
from samebits.rl.publication import read_weights, version_of
from samebits.timeline.types import WeightVersion

# What goes with the weights: configuration, tokenizer, chat template.
_BESIDE_WEIGHTS = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "chat_template*",
)  # fmt: skip


def save_model(trainer: TrainerSide, version: WeightVersion, source: Path, target: Path) -> dict[str, Any]:
    """Writes the trainer's weights to `target`, with configuration and tokenizer of the model directory `source`.

    `target` appears when it is complete. Returns its version, digest, and the sha256 of each file. Raises RunFailed
    where the files don't hold the weights of `version`, OSError where they can't be written.
    """
    partial = target.with_name(f"{target.name}.partial")
    partial.mkdir()
    trainer.save(str(partial))
    if version_of(version.counter, tree_digests(read_weights(partial))) != version:
        raise RunFailed(f"{partial}: the files do not hold the weights of version {version.counter}")
    for file in (found for pattern in _BESIDE_WEIGHTS for found in source.glob(pattern)):
        shutil.copyfile(file, partial / file.name)
    # safetensors lets nobody but the owner read what it writes
    shutil.copymode(partial / "config.json", partial / "model.safetensors")
    partial.rename(target)
    digests = file_digests(sorted(target.iterdir()))
    return {
        "version": version.counter,
        "digest": version.digest,
        "files": {file.name: digest for file, digest in digests.items()},
    }
