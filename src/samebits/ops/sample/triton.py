"""The Triton kernels, on tensors of a CUDA or HIP device."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.device_counters import slot
from samebits.backends.launcher import cdiv, launcher, next_power_of_2
from samebits.ops.logprob import triton as logprob
from samebits.ops.logprob.rows import Temperature
from samebits.ops.sample import kernels

BLOCK = 1024  # columns of one block; free, like everything about these launches

_TYPES = {"logits": "*fp32", "temperatures": "*fp32", "states": "*i64", "sums": "*i64", "highest": "*fp32"}
_TYPES |= {"counter": "*i64"} | dict.fromkeys(("columns", "stride", "blocks"), "i32")
_DRAW = {"greedy": "*i32", "seeds": "*i64", "positions": "*i64", "tokens": "*i64"}
KERNELS = (
    ("block_sums", kernels.block_sums, _TYPES, {"BLOCK": BLOCK}, {"num_warps": 8}),
    ("choose", kernels.choose, _TYPES | _DRAW, {"BLOCK": BLOCK, "BLOCKS": 256}, {"num_warps": 8}),
)


def sample_and_logprob(
    logits: Tensor, temperature: Temperature, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """As the definition."""
    rows, columns = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    temperatures = torch.as_tensor(temperature, dtype=torch.float32, device=device).expand(rows)
    warm = torch.where(temperatures == 0, 1.0, temperatures).contiguous()
    if rows == 0:
        return tokens, torch.empty(0, dtype=torch.float32, device=device)
    states = logprob.state(logits, warm).contiguous()
    blocks = cdiv(columns, BLOCK)
    sums = torch.empty(rows, blocks, 4, dtype=torch.int64, device=device)
    highest = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    shape = (columns, logits.stride(0), blocks)
    launcher(kernels.block_sums)[(rows, blocks)](
        logits, warm, states, sums, highest, slot("sample.block_sums", device), *shape,
        BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    launcher(kernels.choose)[(rows,)](
        logits, warm, (temperatures == 0).int(), states, sums, highest, seeds.contiguous(), positions.contiguous(),
        tokens, slot("sample.choose", device), *shape,
        BLOCK=BLOCK, BLOCKS=next_power_of_2(blocks), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    z = logits.gather(1, tokens.clamp(min=0)[:, None]) / warm[:, None]
    return tokens, logprob.finish(states, z)[:, 0]
