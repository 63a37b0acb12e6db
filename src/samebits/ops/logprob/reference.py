"""The definition of the order-free log-sum-exp, of log-probabilities and of their gradient, by bits."""

from __future__ import annotations

import torch

from samebits.arithmetic import LOG2_E, canonical_nan, dot, exp2, exp2_core, fma
from samebits.ops.logprob.contract import (
    ATANH_TERMS,
    EMPTY_TOP,
    LN_2,
    LOG2_E_LOW,
    SQRT_2,
    T_LIMIT,
    TOP_LIMIT,
    WINDOW_BITS,
    WINDOWS,
)
from samebits.ops.logprob.rows import NO_TARGET, Temperature


def scaled(logits: torch.Tensor, temperature: Temperature) -> torch.Tensor:
    """z [T, V] = logits / temperature, fp32."""
    return logits / torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).reshape(-1, 1)


def terms(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """2^(z log2 e) as (significand q, exponent i), int64: the term is q * 2^(i - 23), q in [2^23, 2^24)."""
    t = z * LOG2_E
    # as selections, so that NaN goes to the upper limit
    t = torch.where(t < T_LIMIT, t, torch.full_like(t, T_LIMIT))
    n = torch.where(t > -T_LIMIT, t, torch.full_like(t, -T_LIMIT)).round()
    r = fma(z, torch.full_like(z, LOG2_E), -n)
    r = fma(z, torch.full_like(z, LOG2_E_LOW), r)
    r = torch.where(r < 0.5, r, torch.full_like(r, 0.5))
    r = torch.where(r > -0.5, r, torch.full_like(r, -0.5))
    bits = exp2_core(r).view(torch.int32).long()
    return (bits & 0x7FFFFF) | 0x800000, n.long() + (bits >> 23) - 127


def state(logits: torch.Tensor, temperature: Temperature) -> torch.Tensor:
    """int64 [T, 5]: the top window of each row, then the sums of that window and the three below it."""
    if logits.shape[1] == 0:
        return empty_state(logits.shape[0], logits.device)
    q, i = terms(scaled(logits, temperature))
    window = i >> (WINDOW_BITS.bit_length() - 1)
    top = window.amax(dim=1, keepdim=True)
    value = q << (i & (WINDOW_BITS - 1))
    # integer sums: exact, so their order is free
    sums = [torch.where(window == top - k, value, 0).sum(dim=1, keepdim=True) for k in range(WINDOWS)]
    return torch.cat([top, *sums], dim=1)


def empty_state(rows: int, device: torch.device) -> torch.Tensor:
    """The state of no terms: what merging leaves unchanged."""
    out = torch.zeros(rows, 1 + WINDOWS, dtype=torch.int64, device=device)
    out[:, 0] = EMPTY_TOP
    return out


def merge(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """States [T, 5] of two disjoint sets of terms -> the state of their union."""
    top = torch.maximum(left[:, :1], right[:, :1])
    return torch.cat([top, _aligned(left, top) + _aligned(right, top)], dim=1)


def _aligned(state: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """The window sums [T, 4] counted from `top` (>= the state's own top)."""
    source = torch.arange(WINDOWS, device=state.device) - (top - state[:, :1])
    return torch.where(source >= 0, state[:, 1:].gather(1, source.clamp_min(0)), 0)


def lse64(states: torch.Tensor) -> torch.Tensor:
    """States [T, 5] -> float64 [T]; -inf for a row without a finite term, NaN for one that has no softmax."""
    top, sums = states[:, 0], states[:, 1:].double()
    total = sums[:, 0]
    for k in range(1, WINDOWS):
        total = total * 2.0**WINDOW_BITS + sums[:, k]
    bits = total.view(torch.int64)
    exponent = (bits >> 52) - 1023
    m = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)
    high = m > SQRT_2
    m = torch.where(high, m * 0.5, m)
    exponent = exponent + high + WINDOW_BITS * (top - (WINDOWS - 1)) - 23
    lse = exponent.double() * LN_2 + _log_near_one(m)
    lse = torch.where(top < -TOP_LIMIT, torch.full_like(lse, -torch.inf), lse)
    return torch.where(top >= TOP_LIMIT, torch.full_like(lse, torch.nan), lse)


def _log_near_one(m: torch.Tensor) -> torch.Tensor:
    """ln m for float64 m in [1/sqrt 2, sqrt 2]: 2 atanh((m - 1) / (m + 1)) by its series."""
    f = (m - 1.0) / (m + 1.0)
    square = f * f
    series = torch.full_like(m, 1.0 / (2 * ATANH_TERMS - 1))
    for k in range(ATANH_TERMS - 2, -1, -1):
        series = series * square + 1.0 / (2 * k + 1)
    return (2.0 * f) * series


def lse(states: torch.Tensor) -> torch.Tensor:
    """States [T, 5] -> lse fp32 [T]."""
    return lse64(states).float()


def finish(states: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """States [T, 5] and scaled target logits z [T, N] -> logp fp32 [T, N]."""
    total = lse64(states)[:, None]
    logp = (z.double() - total).float()
    logp = torch.where(logp > 0, torch.zeros_like(logp), logp)
    undefined = torch.isnan(logp) | ~torch.isfinite(total)
    return torch.where(undefined, torch.full_like(logp, torch.nan), logp)


def logprob(logits: torch.Tensor, targets: torch.Tensor, temperature: Temperature) -> torch.Tensor:
    """Logits [T, V], targets [T, N] -> fp32 [T, N]; +0 where a target is no column."""
    known = (targets >= 0) & (targets < logits.shape[1])
    z = scaled(logits, temperature).gather(1, torch.where(known, targets, 0))
    return torch.where(known, finish(state(logits, temperature), z), 0.0)


def linear_state(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: Temperature,
    arithmetic: str,
) -> torch.Tensor:
    """int64 [T, 6]: the state of hidden @ weight^T, then the fp32 bits of the target's z, or NO_TARGET.

    `targets` [T] count from this weight's first row; others may hold the target (then it is out of range).
    """
    z = scaled(logits_of(hidden, weight, bias, arithmetic), temperature)
    own = (targets >= 0) & (targets < weight.shape[0])
    picked = z.gather(1, torch.where(own, targets, 0)[:, None]) if weight.shape[0] else z.new_zeros(len(z), 1)
    bits = picked[:, 0].view(torch.int32).long() & 0xFFFFFFFF
    return torch.cat([state(z, 1.0), torch.where(own, bits, NO_TARGET)[:, None]], dim=1)


def logits_of(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, arithmetic: str) -> torch.Tensor:
    """fp32 [T, V]: each logit one sum over the hidden size; the bias is added after it. NaN is 0x7fc00000."""
    logits = canonical_nan(dot(hidden, weight, None, arithmetic))
    return logits if bias is None else logits + bias.float()


def logit_gradient(
    upstream: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: Temperature,
    lse: torch.Tensor,
) -> torch.Tensor:
    """dz bf16 [T, V] = upstream * (onehot - 2^((z - lse) log2 e)) / temperature, fp32, rounded once."""
    probability = exp2((scaled(logits, temperature) - lse[:, None]) * LOG2_E)
    onehot = (torch.arange(logits.shape[1], device=logits.device) == targets[:, None]).float()
    return scaled(upstream[:, None] * (onehot - probability), temperature).bfloat16()


def linear_backward(
    upstream: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: Temperature,
    lse: torch.Tensor,
    dw: torch.Tensor | None,
    dbias: torch.Tensor | None,
    arithmetic: str,
) -> torch.Tensor:
    """fp32 dhidden [T, H], a sum over columns; dw [V, H] and dbias [V] (fp32) go on token by token."""
    dz = logit_gradient(upstream, logits_of(hidden, weight, bias, arithmetic), targets, temperature, lse)
    if dw is not None:
        dw.copy_(canonical_nan(dot(dz.t(), hidden.t(), dw, arithmetic)))
    if dbias is not None:
        for row in dz.float():
            dbias += row
        dbias.copy_(canonical_nan(dbias))
    return canonical_nan(dot(dz, weight.t(), None, arithmetic))
