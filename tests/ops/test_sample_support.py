"""Supports: kernels against exact whole numbers, what each limit leaves, draws and scores over what is left."""

from __future__ import annotations

import pytest
import torch

from samebits import _cpu
from samebits.bits import assert_same
from samebits.ops.logprob import logprob
from samebits.ops.logprob import reference as logprob_reference
from samebits.ops.sample import sample_and_logprob
from samebits.ops.sample_support import Kept, Limits, kept_logprob, ordered, reference, sample_kept, sample_support
from samebits.ops.sample_support.reference import prefix

ROWS = 256
INF = float("inf")


def rows_of(vocabulary: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, Limits]:
    """(logits with ties, -inf, rows of equal logits and of one finite logit; temperatures; limits of every kind)."""
    g = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=g) * torch.logspace(-2, 1.5, rows)[:, None]
    logits[: rows // 4] = (4 * logits[: rows // 4]).round() / 4
    logits[:, 1:][torch.rand(rows, vocabulary - 1, generator=g) < 0.05] = -INF
    logits[1::16] = 0.5
    logits[2::16] = torch.tensor([0.0, -0.0]).repeat(vocabulary)[:vocabulary]
    logits[3::16, 1:] = -INF
    temperature = torch.linspace(0.1, 2, rows)
    temperature[5::16] = 0
    top_k = torch.randint(1, max(2, min(vocabulary, 60)), (rows,), generator=g)
    top_p = torch.rand(rows, generator=g).clamp_min(1e-3)
    min_p = torch.rand(rows, generator=g) ** 3
    each = torch.randint(0, 8, (rows,), generator=g)  # which of the three limits a row has
    limits = Limits(top_k * (each & 1), torch.where(each & 2 > 0, top_p, 1.0), torch.where(each & 4 > 0, min_p, 0.0))
    return logits, temperature, limits


def assert_same_kept(one: Kept, other: Kept, what: str = "") -> None:
    assert_same(one.counts, other.counts, f"{what}: counts")
    assert_same(one.ids, other.ids, f"{what}: ids")


def keys(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rows)
    return torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g), torch.arange(rows) % 50


@pytest.mark.parametrize("vocabulary", [1, 7, 60])
def test_sorted_rows_keep_what_the_definition_does(vocabulary: int) -> None:
    logits, temperature, limits = rows_of(vocabulary)
    some = (limits.any() & (temperature > 0)).nonzero()[:, 0]
    limits = Limits(limits.top_k[some], limits.top_p[some], limits.min_p[some])
    kept = reference.support(logits[some], temperature[some], limits)
    mask = ordered.kept_mask(logprob_reference.scaled(logits[some], temperature[some]), limits, logprob_reference.terms)
    assert_same_kept(Kept(mask.sum(dim=1), mask.nonzero()[:, 1]), kept)
    one_more = Limits(limits.top_k, limits.top_p, limits.min_p / 2)
    if vocabulary > 1:
        z = logprob_reference.scaled(logits[some], temperature[some])
        assert not torch.equal(ordered.kept_mask(z, one_more, logprob_reference.terms), mask)


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 16, 500, 600])
def test_kernels_keep_draw_and_score_what_the_definition_does(vocabulary: int, instruction_set) -> None:
    logits, temperature, limits = rows_of(vocabulary)
    kept = sample_support(logits, temperature, limits, backend="reference")
    limited = limits.any() & (temperature > 0)
    assert torch.equal(kept.limited, limited)
    tokens, logp = sample_kept(logits, temperature, *keys(ROWS), kept, backend="reference")
    warm = torch.where(temperature == 0, 1.0, temperature)
    targets = torch.stack([tokens, tokens.flip(0)], dim=1)
    scores = kept_logprob(logits, targets, warm, kept, backend="reference")
    assert_same(scores[:, 0], logp, "one score")
    for isa in ("scalar", "avx2", "best"):
        instruction_set(isa)
        assert_same_kept(sample_support(logits, temperature, limits), kept, isa)
        got = sample_kept(logits, temperature, *keys(ROWS), kept)
        assert_same(got[0], tokens, f"{isa}: tokens")
        assert_same(got[1], logp, f"{isa}: logp")
        assert_same(kept_logprob(logits, targets, warm, kept), scores, f"{isa}: scores")


def test_a_large_vocabulary(instruction_set) -> None:
    vocabulary, rows = 151_936, 6
    logits, _, _ = rows_of(vocabulary, rows)
    limits = Limits(
        torch.tensor([0, 20, 0, 1, 5000, 0]), torch.tensor([0.9, 1.0, 0.999, 0.5, 0.7, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.01, 1e-4]),
    )  # fmt: skip
    kept = sample_support(logits, 0.9, limits, backend="reference")
    assert int(kept.counts.max()) > 100_000
    assert int(kept.counts.min()) == 1
    tokens, logp = sample_kept(logits, 0.9, *keys(rows), kept, backend="reference")
    for isa in ("scalar", "avx2", "best"):
        instruction_set(isa)
        assert_same_kept(sample_support(logits, 0.9, limits), kept, isa)
        got = sample_kept(logits, 0.9, *keys(rows), kept)
        assert_same(got[0], tokens, f"{isa}: tokens")
        assert_same(got[1], logp, f"{isa}: logp")


def test_a_support_depends_on_its_own_row_only() -> None:
    logits, temperature, limits = rows_of(20_000)
    whole = sample_support(logits, temperature, limits)
    order = torch.arange(ROWS).flip(0)
    turned = Limits(limits.top_k[order], limits.top_p[order], limits.min_p[order])
    assert_same_kept(sample_support(logits[order], temperature[order], turned).select(order), whole, "flipped")
    for count in (1, 2, 3):
        _cpu.set_threads(count)
        try:
            for r in range(0, ROWS, 32):
                one = slice(r, r + 1)
                alone = Limits(limits.top_k[one], limits.top_p[one], limits.min_p[one])
                got = sample_support(logits[one], temperature[one], alone)
                assert_same_kept(got, whole.select(torch.tensor([r])), f"{count} threads, row {r}")
        finally:
            _cpu.set_threads(0)


def test_logits_gathered_from_ranks_keep_the_same_ids() -> None:
    logits, temperature, limits = rows_of(1000)
    parts = logits.chunk(4, dim=1)
    padded = torch.cat([torch.cat(parts, dim=1), torch.full((ROWS, 24), 7.0)], dim=1)
    assert_same_kept(sample_support(padded[:, :1000], temperature, limits), sample_support(logits, temperature, limits))


def kept_of(logits: list[float], **limits: float) -> list[int]:
    row = torch.tensor([logits])
    found = [sample_support(row, 1.0, Limits.of(1, **limits), backend=b).row(0).tolist() for b in ("cpu", "reference")]  # type: ignore[arg-type]
    assert found[0] == found[1]
    return found[0]


LOG = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().tolist()


@pytest.mark.parametrize(
    ("logits", "limits", "kept"),
    [
        ([1.0, 3.0, 2.0, 3.0], {"top_k": 1}, [1]),
        ([1.0, 3.0, 2.0, 3.0], {"top_k": 2}, [1, 3]),
        ([1.0, 3.0, 2.0, 3.0], {"top_k": 9}, [0, 1, 2, 3]),
        ([0.0, -0.0, 0.0, -0.0], {"top_k": 3}, [0, 1, 2]),
        ([0.0] * 4, {"top_p": 0.5}, [0, 1]),
        ([0.0] * 4, {"top_p": 0.50001}, [0, 1, 2]),
        ([0.0] * 4, {"top_p": 1e-30}, [0]),
        ([0.0] * 4, {"min_p": 1.0}, [0, 1, 2, 3]),
        ([5.0, -INF, -INF], {"top_k": 3}, [0]),
        ([5.0, -INF, -INF], {"top_p": 0.99}, [0]),
        ([-INF, 1.0, -INF, 1.0], {"top_k": 4}, [1, 3]),
        (LOG, {"top_p": 0.74}, [0, 1]),
        (LOG, {"top_p": 0.76}, [0, 1, 2]),
        (LOG, {"min_p": 0.2}, [0, 1, 2, 3]),
        (LOG, {"min_p": 0.26}, [0, 1]),
        # of the three that top-k leaves, with masses 4/7, 2/7, 1/7, two reach 0.8
        (LOG, {"top_k": 3, "top_p": 0.8}, [0, 1]),
        # of the two that min-p leaves, with masses 2/3 and 1/3, one reaches 0.6
        (LOG, {"min_p": 0.3, "top_p": 0.6}, [0]),
        ([0.0, -200.0], {"top_p": 0.999999}, [0]),
        ([0.0, -200.0], {"top_k": 2}, [0, 1]),
    ],
)  # fmt: skip
def test_what_each_limit_leaves(logits: list[float], limits: dict[str, float], kept: list[int]) -> None:
    assert kept_of(logits, **limits) == kept


def test_the_order_of_operations_is_min_p_then_top_k_then_top_p() -> None:
    logits, temperature, limits = rows_of(500)
    rows = limits.any() & (temperature > 0)
    kept = sample_support(logits, temperature, limits)
    for r in rows.nonzero()[:, 0].tolist():
        z = (logits[r] / temperature[r]).sort(descending=True, stable=True)
        values = z.values[z.values > -INF]
        after_min_p = prefix(values, 0, 1.0, float(limits.min_p[r]))
        after_top_k = prefix(values[:after_min_p], int(limits.top_k[r]), 1.0, 0.0)
        after_top_p = prefix(values[:after_top_k], 0, float(limits.top_p[r]), 0.0)
        assert kept.row(r).tolist() == sorted(z.indices[:after_top_p].tolist())


def test_temperature_comes_first() -> None:
    hot, cold = (sample_support(torch.tensor([LOG]), t, Limits.of(1, top_p=0.72)).row(0).tolist() for t in (4.0, 0.5))
    assert (hot, cold) == ([0, 1, 2], [0])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_the_kept_mass_against_float64(temperature: float) -> None:
    g = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(ROWS, 5000, generator=g)
    wanted = torch.rand(ROWS, generator=g).clamp(0.05, 0.98)
    kept = sample_support(logits, temperature, Limits(torch.zeros(ROWS).long(), wanted, torch.zeros(ROWS)))
    p = torch.softmax(logits.double() / temperature, dim=1)
    for r in range(ROWS):
        ids = kept.row(r)
        mass, last = p[r, ids].sum(), p[r, ids].min()
        assert mass >= wanted[r] - 1e-6
        assert mass - last < wanted[r] + 1e-6
        assert p[r, ids].min() >= p[r].masked_fill(torch.zeros(5000).bool().index_fill(0, ids, True), 0).max() - 1e-12


def test_scores_over_a_support_against_float64() -> None:
    logits, temperature, limits = rows_of(1111)
    temperature = temperature.clamp_min(0.1)
    kept = sample_support(logits, temperature, limits)
    tokens, logp = sample_kept(logits, temperature, *keys(ROWS), kept)
    z = logits.double() / temperature[:, None].double()
    for r in range(ROWS):
        ids = kept.row(r) if kept.counts[r] else torch.arange(1111)
        exact = z[r, tokens[r]] - z[r, ids].logsumexp(0)
        assert abs(logp[r] - exact) <= 2e-6 * max(1.0, float(z[r, tokens[r]].abs()))


def test_a_row_that_keeps_all_is_scored_as_ever() -> None:
    logits, temperature, _ = rows_of(500)
    everything = Kept.of([list(range(500))] * ROWS)
    warm = temperature.clamp_min(0.1)
    plain = sample_and_logprob(logits, warm, *keys(ROWS))
    for kept in (Kept.all(ROWS), everything):
        got = sample_kept(logits, warm, *keys(ROWS), kept)
        assert_same(got[0], plain[0])
        assert_same(got[1], plain[1])
        assert_same(kept_logprob(logits, plain[0][:, None], warm, kept)[:, 0], logprob(logits, plain[0], warm))


def test_what_was_not_kept_has_no_probability() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    kept = Kept.of([[1, 2]])
    for backend in ("cpu", "reference"):
        logp = kept_logprob(logits, torch.tensor([[0, 1, 2, 7]]), 1.0, kept, backend=backend)
        assert logp[0, [0, 3]].tolist() == [-INF, -INF]
        assert logp[0, 1:3].exp().sum() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("limits", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 6, "top_p": 0.9}])
def test_draws_follow_the_softmax_over_the_support(limits: dict[str, float]) -> None:
    draws, vocabulary = 40_000, 12
    row = torch.randn(vocabulary, generator=torch.Generator().manual_seed(11))
    logits = row.expand(draws, vocabulary).contiguous()
    kept = sample_support(logits, 0.7, Limits.of(draws, **limits))  # type: ignore[arg-type]
    ids = kept.row(0)
    tokens, _ = sample_kept(logits, 0.7, torch.arange(draws), torch.zeros(draws).long(), kept)
    seen = torch.bincount(tokens, minlength=vocabulary)
    assert set(seen.nonzero()[:, 0].tolist()) <= set(ids.tolist())
    expected = draws * torch.softmax(row[ids].double() / 0.7, dim=0)
    # 99.99 % of chi-square with at most 11 degrees of freedom lies below 37.4
    assert ((seen[ids] - expected).square() / expected).sum() < 37.4
    shifted = draws * torch.softmax(row[ids].double() / 0.8, dim=0)
    assert ((seen[ids] - shifted).square() / shifted).sum() > 37.4, "another temperature would be noticed"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("value", [float("nan"), INF, 1e30])
def test_a_row_without_a_distribution_is_refused(backend: str, value: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = value
    with pytest.raises(ValueError, match="row 1 has no distribution"):
        sample_support(logits, 1.0, Limits.of(3, top_k=2), backend=backend)
    with pytest.raises(ValueError, match="row 0 has no distribution"):
        sample_support(torch.full((3, 4), -INF), 1.0, Limits.of(3, top_p=0.5), backend=backend)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"top_k": -1}, "top_k must be 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0 in row 0"),
        ({"top_p": 1.5}, "top_p must be in"),
        ({"min_p": float("nan")}, "min_p must be in"),
    ],
)
def test_limits_outside_their_range_are_named(limits: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_support(torch.zeros(2, 4), 1.0, Limits.of(2, **limits))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (Kept(torch.tensor([2]), torch.tensor([3, 1])), "must ascend"),
        (Kept(torch.tensor([2]), torch.tensor([1, 1])), "must ascend"),
        (Kept(torch.tensor([1]), torch.tensor([-1])), "must ascend"),
        (Kept(torch.tensor([2]), torch.tensor([1])), "counts that add up to 2"),
        (Kept(torch.tensor([1, 1]), torch.tensor([1, 1])), "for 1 rows"),
        (Kept(torch.tensor([1]).int(), torch.tensor([1])), "must be contiguous int64"),
        (Kept(torch.tensor([1]), torch.tensor([4])), "kept id 4 in a row of 4 logits"),
    ],
)
def test_a_torn_support_is_refused(kept: Kept, message: str) -> None:
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        sample_kept(torch.zeros(1, 4), 1.0, one, one, kept)


FAULTS = {
    "ties go to the highest id": lambda z, k, p, m: prefix(z, k, p, m),
    "k is off by one": lambda z, k, p, m: prefix(z, k and k + 1, p, m),
    "p is compared before the term is added": lambda z, k, p, m: min(len(z), prefix(z, k, p, m) + (p < 1)),
    "top-p comes before top-k": lambda z, k, p, m: min(prefix(z, 0, p, m), prefix(z, k, 1.0, m)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_rule_would_be_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, temperature, limits = rows_of(150)
    right = sample_support(logits, temperature, limits)
    if fault.startswith("ties"):
        wrong = sample_support(logits.flip(1), temperature, limits)
        ids = torch.cat([149 - wrong.row(r).flip(0) for r in range(ROWS)])
        assert not torch.equal(ids, right.ids)
        return
    monkeypatch.setattr(reference, "prefix", FAULTS[fault])
    wrong = sample_support(logits, temperature, limits, backend="reference")
    assert not torch.equal(wrong.counts, right.counts)
