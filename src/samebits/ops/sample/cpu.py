"""The C++ kernel, called by address."""

from __future__ import annotations

import torch

from samebits import _cpu
from samebits.ops.logprob.cpu import as_arguments
from samebits.ops.logprob.rows import Temperature


def sample_and_logprob(
    logits: torch.Tensor, temperature: Temperature, seeds: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    logp = torch.empty(rows, dtype=torch.float32)
    temperatures = as_arguments(temperature)
    _cpu.sample(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        columns,
        *temperatures,
        seeds.data_ptr(),
        positions.data_ptr(),
        tokens.data_ptr(),
        logp.data_ptr(),
    )
    return tokens, logp
