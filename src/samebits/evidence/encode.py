"""Writing a step's sidecar with the safetensors library. The layout is in `sidecar.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from safetensors.numpy import save

from samebits.evidence.sidecar import StepSample


def encode_step(samples: Sequence[StepSample]) -> bytes:
    """The sidecar's bytes. Log-probabilities are viewed as fp32, never converted: every pattern survives."""
    keys = [[int(part) for part in sample.key.split("/")] for sample in samples]
    prompts = [len(sample.prompt_ids) for sample in samples]
    lengths = [len(sample.prompt_ids) + len(sample.token_ids) for sample in samples]
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "sample_keys": np.array(keys, dtype=np.int32).reshape(len(samples), 3),
        "sample_offsets": np.cumsum([0, *lengths], dtype=np.int64),
        "prompt_lengths": np.array(prompts, dtype=np.int32),
        "token_ids": _join([ids for sample in samples for ids in (sample.prompt_ids, sample.token_ids)], np.int32),
        "active_mask": _join(
            [[0] * len(sample.prompt_ids) + [1] * len(sample.token_ids) for sample in samples], np.uint8
        ),
        "rollout_logp": _join([sample.rollout_bits for sample in samples], np.uint32).view(np.float32),
        "trainer_logp": _join([sample.trainer_bits for sample in samples], np.uint32).view(np.float32),
        "weight_version": _join([sample.versions for sample in samples], np.int64),
        "rewards": np.array([sample.reward for sample in samples], dtype=np.float64),
        "advantages": np.array([sample.advantage for sample in samples], dtype=np.float64),
    }
    supports = [sample.support for sample in samples if sample.support is not None]
    if supports:
        if len(supports) != len(samples):
            raise ValueError(f"{len(supports)} of {len(samples)} samples have supports; all or none must")
        tensors["support_counts"] = _join([support.counts for support in supports], np.int32)
        tensors["support_ids"] = _join([support.ids for support in supports], np.int32)
    return bytes(save(tensors))


def _join(parts: Sequence[Sequence[int]], dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.asarray(part, dtype=dtype) for part in parts])
