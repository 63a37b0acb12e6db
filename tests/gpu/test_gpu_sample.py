"""The draw on a GPU against its definition, token by token and bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samebits.bits import assert_same
from samebits.ops.logprob import logprob, score
from samebits.ops.sample import draw, reference, sample_and_logprob
from samebits.ops.sample_support import Limits, kept_logprob, sample_kept, sample_support

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: run `python -m pytest tests/gpu` on a machine with one"
)
ROWS = 256


def draws(columns: int, scale: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits with ties and -inf, temperatures with greedy rows, seeds and positions, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(ROWS, columns, generator=generator)
    logits[::3] = logits[::3].round()
    logits[1::4].masked_fill_(torch.rand(logits[1::4].shape, generator=generator) < 0.5, float("-inf"))
    logits[:, 0] = 0.0
    temperature = torch.tensor([0.0, 0.2, 0.7, 1.0, 1.3, 2.0]).repeat(ROWS // 6 + 1)[:ROWS]
    seeds = torch.randint(-(2**63), 2**63 - 1, (ROWS,), generator=generator)
    return logits, temperature, seeds, torch.arange(ROWS) * 977


def on_gpu(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    tokens, logp = sample_and_logprob(*(t.cuda() for t in inputs))
    return tokens.cpu(), logp.cpu()


@pytest.mark.parametrize(("columns", "scale"), [(1, 1.0), (2, 1.0), (2047, 3.0), (5000, 0.01), (5000, 60.0)])
def test_tokens_and_log_probabilities_are_the_definitions(columns: int, scale: float) -> None:
    inputs = draws(columns, scale)
    tokens, logp = on_gpu(*inputs)
    expected, expected_logp = reference.sample_and_logprob(*inputs)
    assert_same(tokens, expected, "tokens")
    assert_same(logp, expected_logp, "log-probabilities")


def some_limits() -> Limits:
    """Every combination of limits, none among them."""
    generator = torch.Generator().manual_seed(5)
    each = torch.arange(ROWS) % 8
    top_p, min_p = (torch.rand(ROWS, generator=generator).clamp_min(1e-3) for _ in range(2))
    top_k = torch.randint(1, 60, (ROWS,), generator=generator)
    return Limits(top_k * (each & 1), torch.where(each & 2 > 0, top_p, 1.0), torch.where(each & 4 > 0, min_p**3, 0.0))


@pytest.mark.parametrize(("columns", "scale"), [(1, 1.0), (7, 1.0), (2047, 3.0), (5000, 0.01)])
def test_supports_draws_and_scores_under_limits_are_the_definitions(columns: int, scale: float) -> None:
    logits, temperature, *keys = draws(columns, scale)
    limits, there = some_limits(), [t.cuda() for t in (logits, temperature, *keys)]
    want = sample_support(logits, temperature, limits, backend="reference")
    kept = sample_support(there[0], there[1], limits)
    assert_same(kept.counts, want.counts, "counts")
    assert_same(kept.ids, want.ids, "ids")
    expected, expected_logp = sample_kept(logits, temperature, *keys, want, backend="reference")
    tokens, logp = sample_kept(*there, kept)
    assert_same(tokens.cpu(), expected, "tokens")
    assert_same(logp.cpu(), expected_logp, "log-probabilities")
    warm = torch.where(temperature == 0, 1.0, temperature)
    targets = torch.stack([expected, expected.flip(0)], dim=1)
    scores = kept_logprob(there[0], targets.cuda(), warm.cuda(), kept)
    assert_same(scores.cpu(), kept_logprob(logits, targets, warm, want, backend="reference"), "scores")


def test_neither_a_draw_nor_a_score_waits_for_the_card() -> None:
    logits, temperature, *keys = (t.cuda() for t in draws(2047, 3.0))
    tokens, logp = draw(logits, temperature, *keys)
    warm = torch.where(temperature > 0, temperature, 1.0)
    scores = score(logits, tokens, warm)  # kernels are compiled and loaded now
    torch.cuda.set_sync_debug_mode("error")
    try:
        draw(logits, temperature, *keys)
        score(logits, tokens, warm)
        with pytest.raises(RuntimeError, match="synchronizing"):
            logprob(logits, tokens, warm)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(scores, logp, "scores of what was drawn")


def test_another_seed_is_noticed() -> None:
    logits, temperature, seeds, positions = draws(2047, 3.0)
    tokens, _ = on_gpu(logits, temperature, seeds + 1, positions)
    expected, _ = reference.sample_and_logprob(logits, temperature, seeds, positions)
    assert int((tokens != expected).sum()) > ROWS // 2


def test_a_row_does_not_depend_on_the_batch() -> None:
    inputs = draws(151_936, 4.0, seed=1)
    tokens, logp = on_gpu(*inputs)
    for row in (0, 1, 5, 200):
        alone = on_gpu(*(t[row : row + 1] for t in inputs))
        assert_same(alone[0], tokens[row : row + 1], "token")
        assert_same(alone[1], logp[row : row + 1], "log-probability")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_without_a_distribution_is_refused(bad: float) -> None:
    logits, temperature, seeds, positions = draws(300, 1.0)
    logits[7, 5] = bad
    with pytest.raises(ValueError, match="row 7"):
        on_gpu(logits, temperature, seeds, positions)
