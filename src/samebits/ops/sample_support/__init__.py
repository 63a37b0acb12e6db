"""Which ids a sampler may draw from, recorded so that a trainer can renormalise over the same ones.

Min-p, top-k and top-p each leave a prefix of one exact order, decided by comparisons and integer sums, so a support
depends on nothing but the bits of a row's logits, its temperature and its limits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends import pick
from samebits.ops.logprob import logprob
from samebits.ops.logprob.rows import Temperature, check_ids, check_logits, check_temperature
from samebits.ops.sample import sample_and_logprob
from samebits.ops.sample_support.contract import SAMPLE_SUPPORT as SAMPLE_SUPPORT
from samebits.ops.sample_support.head import BACKENDS
from samebits.ops.sample_support.head import kept_linear_logp as kept_linear_logp
from samebits.ops.sample_support.rows import NO_DISTRIBUTION
from samebits.ops.sample_support.rows import Kept as Kept
from samebits.ops.sample_support.rows import Limits as Limits


def sample_support(logits: Tensor, temperature: Temperature, limits: Limits, backend: str | None = None) -> Kept:
    """The ids that min-p, top-k and top-p, in this order, leave of each row of logits fp32 [T, V].

    A row that nothing limits keeps all; so does a row of temperature 0, whose token no limit can change. Raises
    ValueError for a limited row without a distribution (NaN, +inf, or nothing finite). `limits` and the result lie
    on the CPU, wherever the logits are.
    """
    rows = len(logits)
    check_logits("sample_support", logits)
    check_temperature("sample_support", temperature, rows, zero=True)
    limits.check(rows)
    each = _each(temperature, logits)
    limited = limits.any() & (each > 0).cpu()
    some = limited.nonzero()[:, 0]
    if not len(some):
        return Kept.all(rows)
    if len(some) < rows:
        logits, temperature = logits[some], each[some]
        limits = Limits(limits.top_k[some], limits.top_p[some], limits.min_p[some])
    kept = pick("sample_support", BACKENDS, backend, logits).support(logits, temperature, limits)
    if bool((kept.counts == NO_DISTRIBUTION).any()):
        row = int(some[(kept.counts == NO_DISTRIBUTION).nonzero()[0]])
        raise ValueError(f"sample_support: row {row} has no distribution: it holds NaN or +inf, or nothing finite")
    return Kept(torch.zeros(rows, dtype=torch.int64).index_copy(0, some, kept.counts), kept.ids)


def sample_kept(
    logits: Tensor, temperature: Temperature, seeds: Tensor, positions: Tensor, kept: Kept, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [T] drawn from the kept ids of each row, and their log-probabilities over these, fp32 [T].

    Other arguments and refusals are those of `sample_and_logprob`, which serves the rows that keep all.
    """
    rows, limited = len(logits), kept.limited
    kept.check(rows)
    if not bool(limited.any()):
        return sample_and_logprob(logits, temperature, seeds, positions, backend)
    check_logits("sample_kept", logits)
    check_temperature("sample_kept", temperature, rows, zero=True)
    for name, ids in (("seeds", seeds), ("positions", positions)):
        check_ids("sample_kept", name, ids, rows)
    _check_columns("sample_kept", kept, logits)
    each = _each(temperature, logits)
    impl, some = pick("sample_kept", BACKENDS, backend, logits, seeds, positions, kept.ids), limited.nonzero()[:, 0]
    if len(some) == rows:
        tokens, logp = impl.sample_kept(logits, each, seeds, positions, kept)
    else:
        free = (~limited).nonzero()[:, 0]
        tokens, logp = seeds.new_empty(rows), logits.new_empty(rows)
        tokens[free], logp[free] = sample_and_logprob(logits[free], each[free], seeds[free], positions[free], backend)
        tokens[some], logp[some] = impl.sample_kept(
            logits[some], each[some], seeds[some], positions[some], kept.select(some)
        )
    if rows and int(tokens.min()) < 0:
        row = int((tokens < 0).nonzero()[0])
        raise ValueError(f"sample_kept: row {row} has no distribution: it holds NaN or +inf, or nothing finite")
    return tokens, logp


def kept_logprob(
    logits: Tensor, targets: Tensor, temperature: Temperature, kept: Kept, backend: str | None = None
) -> Tensor:
    """log softmax over the kept ids at `targets` int64 [T, N]: fp32, -inf for a target that its row did not keep.

    Rows that keep all give the bits of `logprob`.
    """
    rows, limited = len(logits), kept.limited
    kept.check(rows)
    check_logits("kept_logprob", logits)
    check_ids("kept_logprob", "targets", targets, rows, axes=(2,))
    check_temperature("kept_logprob", temperature, rows)
    _check_columns("kept_logprob", kept, logits)
    some, free = limited.nonzero()[:, 0], (~limited).nonzero()[:, 0]
    each, logp = _each(temperature, logits), logits.new_empty(targets.shape)
    if len(free):
        logp[free] = logprob(logits[free], targets[free], each[free], backend)
    if len(some):
        impl = pick("kept_logprob", BACKENDS, backend, logits, targets, kept.ids)
        logp[some] = impl.kept_logprob(logits[some], targets[some], each[some], kept.select(some))
    return logp


def _each(temperature: Temperature, logits: Tensor) -> Tensor:
    """One temperature per row of logits, fp32 [T]."""
    if isinstance(temperature, Tensor):
        return temperature
    return torch.full((len(logits),), temperature, dtype=torch.float32, device=logits.device)


def _check_columns(op: str, kept: Kept, logits: Tensor) -> None:
    if len(kept.ids) and int(kept.ids.max()) >= logits.shape[1]:
        raise ValueError(f"{op}: kept id {int(kept.ids.max())} in a row of {logits.shape[1]} logits")
