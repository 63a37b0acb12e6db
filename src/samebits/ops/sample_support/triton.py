"""Supports on a CUDA or HIP device: sorting and whole numbers by torch, terms by a kernel, draws by those of `sample`,
the LM head in `kept_head`.

A row's kept columns are its row with all others at -inf, which has the same terms in the same order.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.arithmetic.triton import count_launch
from samebits.backends.device_counters import slot
from samebits.backends.launcher import cdiv, launcher
from samebits.ops.logprob import triton as logprob
from samebits.ops.logprob.contract import TOP_LIMIT
from samebits.ops.logprob.kernels import term_of
from samebits.ops.logprob.rows import Temperature
from samebits.ops.sample import triton as sample
from samebits.ops.sample_support import kept_head
from samebits.ops.sample_support.kept_head import kept_backward as kept_backward
from samebits.ops.sample_support.kept_head import kept_state as kept_state
from samebits.ops.sample_support.ordered import kept_mask
from samebits.ops.sample_support.rows import NO_DISTRIBUTION, Kept, Limits

BLOCK = 1024


@triton.jit
def terms_of_rows(z, q, i, counter, n, BLOCK: tl.constexpr):
    count_launch(counter)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    significand, exponent = term_of(tl.load(z + at, mask=at < n, other=0.0))
    tl.store(q + at, significand.to(tl.int64), mask=at < n)
    tl.store(i + at, exponent.to(tl.int64), mask=at < n)


@triton.jit
def scaled_rows(logits, temperature, z, counter, V, stride, BLOCK: tl.constexpr):
    count_launch(counter)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * stride + at, mask=at < V, other=0.0)
    value = tl.div_rn(logit, tl.broadcast_to(tl.load(temperature + row), logit.shape))
    tl.store(z + row * V + at, value, mask=at < V)


def _scaled(logits: Tensor, temperature: Temperature) -> Tensor:
    rows, columns = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    warm = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).expand(rows).contiguous()
    z = torch.empty(rows, columns, dtype=torch.float32, device=logits.device)
    if z.numel():
        launcher(scaled_rows)[(rows, cdiv(columns, BLOCK))](
            logits, warm, z, slot("sample_support.scaled", z.device), columns, logits.stride(0), BLOCK=BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
    return z


def _terms(z: Tensor) -> tuple[Tensor, Tensor]:
    z = z.contiguous()
    q, i = (torch.empty(z.shape, dtype=torch.int64, device=z.device) for _ in range(2))
    counter = slot("sample_support.terms", z.device)
    launcher(terms_of_rows)[(cdiv(z.numel(), BLOCK),)](z, q, i, counter, z.numel(), BLOCK=BLOCK, enable_fp_fusion=False)
    return q, i


def support(logits: Tensor, temperature: Temperature, limits: Limits) -> Kept:
    """As the definition; the result lies on the CPU."""
    device = logits.device
    z = _scaled(logits, temperature)
    top = logprob.state(z, 1.0)[:, 0]
    none = (top < -TOP_LIMIT) | (top >= TOP_LIMIT)
    there = Limits(limits.top_k.to(device), limits.top_p.to(device), limits.min_p.to(device))
    mask = kept_mask(torch.where(none[:, None], 0.0, z), there, _terms) & ~none[:, None]
    counts = torch.where(none, NO_DISTRIBUTION, mask.sum(dim=1))
    return Kept(counts.cpu(), mask.nonzero()[:, 1].cpu())


def sample_kept(
    logits: Tensor, temperature: Temperature, seeds: Tensor, positions: Tensor, kept: Kept
) -> tuple[Tensor, Tensor]:
    """As the definition."""
    return sample.sample_and_logprob(_only(logits, kept)[0], temperature, seeds, positions)


def kept_logprob(logits: Tensor, targets: Tensor, temperature: Temperature, kept: Kept) -> Tensor:
    """As the definition."""
    alone, mask = _only(logits, kept)
    scores = logprob.logprob(alone, targets, temperature)
    inside = (targets >= 0) & (targets < logits.shape[1])
    return torch.where(inside & mask.gather(1, targets.clamp(0, logits.shape[1] - 1)), scores, -torch.inf)


def _only(logits: Tensor, kept: Kept) -> tuple[Tensor, Tensor]:
    """Rows with -inf in every column that was not kept, and bool [T, V]: what was."""
    mask = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    mask[kept.owners().to(logits.device), kept.ids.to(logits.device)] = True
    return torch.where(mask, logits, -torch.inf), mask


KERNELS = (
    (
        "scaled", scaled_rows,
        {"logits": "*fp32", "temperature": "*fp32", "z": "*fp32", "counter": "*i64", "V": "i32", "stride": "i64"},
        {"BLOCK": BLOCK}, {"num_warps": 4},
    ),
    (
        "terms", terms_of_rows, {"z": "*fp32", "q": "*i64", "i": "*i64", "counter": "*i64", "n": "i32"},
        {"BLOCK": BLOCK}, {"num_warps": 4},
    ),
    *kept_head.KERNELS,
)  # fmt: skip
