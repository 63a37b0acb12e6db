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
    tokens = seeds.new_empty(rows)
    logp = logits.new_empty(rows)
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
