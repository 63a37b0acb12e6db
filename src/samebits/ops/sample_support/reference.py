"""The definition of a support, of draws from it, and of log-probabilities and gradients over it."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.arithmetic import canonical_nan, dot
from samebits.ops.logprob import reference as logprob_reference
from samebits.ops.logprob.contract import TOP_LIMIT, WINDOW_BITS, WINDOWS
from samebits.ops.logprob.rows import NO_TARGET, Temperature
from samebits.ops.sample.reference import NO_TOKEN, draw, random_bits
from samebits.ops.sample_support.contract import MASS_BITS
from samebits.ops.sample_support.rows import NO_DISTRIBUTION, Kept, Limits


def support(logits: Tensor, temperature: Temperature, limits: Limits) -> Kept:
    """The kept ids of each row, whatever its temperature; NO_DISTRIBUTION as the count of a row that has none."""
    z = logprob_reference.scaled(logits, temperature)
    top = logprob_reference.state(z, 1.0)[:, 0].tolist()
    counts, ids = [], []
    for row, order in enumerate(z.argsort(dim=1, descending=True, stable=True)):
        if not -TOP_LIMIT <= top[row] < TOP_LIMIT:
            counts.append(NO_DISTRIBUTION)
            continue
        ordered = z[row][order]
        ordered = ordered[ordered > -torch.inf]
        count = prefix(ordered, int(limits.top_k[row]), float(limits.top_p[row]), float(limits.min_p[row]))
        counts.append(count)
        ids.append(order[:count].sort().values)
    return Kept(torch.tensor(counts, dtype=torch.int64), torch.cat([torch.zeros(0, dtype=torch.int64), *ids]))


def prefix(z: Tensor, top_k: int, top_p: float, min_p: float) -> int:
    """How many of the descending z [n] min-p, top-k and top-p leave."""
    limit = len(z)
    if min_p > 0:
        terms = _terms(z)
        limit = next((n for n, term in enumerate(terms) if _is_below(term, min_p, terms[0])), limit)
    if top_k > 0:
        limit = min(limit, top_k)
    if top_p >= 1:
        return limit
    weights = _weights(z[:limit])
    wanted = -(-sum(weights) * int(top_p * 2**MASS_BITS) >> MASS_BITS)
    total = 0
    for n, weight in enumerate(weights):
        total += weight
        if total >= wanted:
            return n + 1
    return limit


def _is_below(term: tuple[int, int], min_p: float, largest: tuple[int, int]) -> bool:
    """Whether q 2^i of one is less than min_p times that of the other, in whole numbers."""
    over, under = min_p.as_integer_ratio()
    apart = term[1] - largest[1]
    return term[0] * under << max(0, apart) < largest[0] * over << max(0, -apart)


def _terms(z: Tensor) -> list[tuple[int, int]]:
    q, i = logprob_reference.terms(z)
    return list(zip(q.tolist(), i.tolist(), strict=True))


def _weights(z: Tensor) -> list[int]:
    """The terms of descending z as integers, in units of the lowest window that the first one keeps."""
    terms = _terms(z)
    lowest = terms[0][1] // WINDOW_BITS - (WINDOWS - 1)
    return [q << (i - WINDOW_BITS * lowest) if i // WINDOW_BITS >= lowest else 0 for q, i in terms]


def sample_kept(
    logits: Tensor, temperature: Temperature, seeds: Tensor, positions: Tensor, kept: Kept
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [T] and their log-probabilities fp32 [T] over the kept ids of each row, of which there are some."""
    z = logprob_reference.scaled(logits, temperature)
    tokens, logp = [], []
    for row in range(len(z)):
        ids = kept.row(row)
        part = z[row : row + 1, ids]
        q, i = logprob_reference.terms(part)
        state = logprob_reference.state(part, 1.0)
        top = int(state[0, 0])
        if not -TOP_LIMIT <= top < TOP_LIMIT:
            tokens.append(NO_TOKEN)
            logp.append(logits.new_zeros(1))
            continue
        place = draw(q[0].tolist(), i[0].tolist(), top, random_bits(int(seeds[row]), int(positions[row])))
        tokens.append(int(ids[place]))
        logp.append(logprob_reference.finish(state, part[:, place : place + 1])[0])
    return torch.tensor(tokens, dtype=torch.int64), torch.cat([logits.new_zeros(0), *logp])


def kept_logprob(logits: Tensor, targets: Tensor, temperature: Temperature, kept: Kept) -> Tensor:
    """fp32 [T, N]; -inf for a target that is not among its row's ids."""
    z = logprob_reference.scaled(logits, temperature)
    out = logits.new_full(targets.shape, -torch.inf)
    for row in range(len(z)):
        ids = kept.row(row)
        part = z[row : row + 1, ids]
        scores = logprob_reference.finish(logprob_reference.state(part, 1.0), part)[0]
        for column, target in enumerate(targets[row]):
            (place,) = (ids == target).nonzero(as_tuple=True)
            if len(place):
                out[row, column] = scores[place[0]]
    return out


def kept_state(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Temperature,
    kept: Kept,
    arithmetic: str,
) -> Tensor:
    """int64 [T, 6] as linear_state gives it, each row over its own kept rows of the weight."""
    rows = [_part(weight, bias, targets, temperature, kept, row) for row in range(len(hidden))]
    states = [
        logprob_reference.linear_state(hidden[row : row + 1], part, offset, target, scale, arithmetic)
        if len(part)
        else torch.cat([logprob_reference.empty_state(1, hidden.device), torch.tensor([[NO_TARGET]])], dim=1)
        for row, (part, offset, target, scale) in enumerate(rows)
    ]
    return torch.cat([torch.zeros(0, 6, dtype=torch.int64), *states])


def kept_backward(
    upstream: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Temperature,
    kept: Kept,
    lse: Tensor,
    dw: Tensor | None,
    dbias: Tensor | None,
    arithmetic: str,
) -> Tensor:
    """fp32 dhidden [T, H], a chain over kept columns; dw and dbias go on token by token where they were kept."""
    dhidden = hidden.new_zeros(hidden.shape, dtype=torch.float32)
    for row in range(len(hidden)):
        here, ids = slice(row, row + 1), kept.row(row)
        part, offset, target, scale = _part(weight, bias, targets, temperature, kept, row)
        if not len(ids):
            continue
        logits = logprob_reference.logits_of(hidden[here], part, offset, arithmetic)
        dz = logprob_reference.logit_gradient(upstream[here], logits, target, scale, lse[here])
        dhidden[here] = canonical_nan(dot(dz, part.t(), None, arithmetic))
        if dw is not None:
            dw[ids] = canonical_nan(dot(dz.t(), hidden[here].t(), dw[ids], arithmetic))
        if dbias is not None:
            dbias[ids] = canonical_nan(dbias[ids] + dz[0].float())
    return dhidden


def _part(
    weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Temperature, kept: Kept, row: int
) -> tuple[Tensor, Tensor | None, Tensor, Temperature]:
    """One row's kept rows of weight and bias, where its target is among them (-1: not), and its temperature."""
    ids = kept.row(row)
    (place,) = (ids == targets[row]).nonzero(as_tuple=True)
    target = place[:1] if len(place) else torch.tensor([-1])
    scale = temperature[row : row + 1] if isinstance(temperature, Tensor) else temperature
    return weight[ids], None if bias is None else bias[ids], target, scale
