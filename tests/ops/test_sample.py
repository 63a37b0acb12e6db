"""Exact draws: the generator's published vectors, kernels against whole-number arithmetic, the distribution."""

import pytest
import torch

from samebits import _cpu
from samebits.bits import assert_same
from samebits.ops.logprob import logprob
from samebits.ops.sample import reference, sample, sample_and_logprob

ROWS = 256
INF = float("inf")


def case(vocabulary: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits, one temperature per row of which some are 0, seeds, positions)."""
    g = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=g) * torch.logspace(-2, 1.5, rows)[:, None]
    logits[:, 1:][torch.rand(rows, vocabulary - 1, generator=g) < 0.05] = -INF
    temperature = torch.linspace(0.1, 2, rows)
    temperature[::7] = 0
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    return logits, temperature, seeds, torch.randint(0, 2**40, (rows,), generator=g)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers of Random123's Philox4x32-10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_generator_gives_the_published_words(counter, key, words) -> None:
    assert reference.philox(counter, key) == words


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 16, 500, 512, 1111])
def test_kernel_draws_what_whole_numbers_draw(vocabulary: int, instruction_set) -> None:
    arguments = case(vocabulary)
    tokens, logp = sample_and_logprob(*arguments, backend="reference")
    for isa in ("scalar", "avx2", "best"):
        instruction_set(isa)
        got = sample_and_logprob(*arguments)
        assert_same(got[0], tokens, f"{isa}: tokens")
        assert_same(got[1], logp, f"{isa}: logp")


def test_a_large_vocabulary_is_drawn_from_exactly() -> None:
    logits, temperature, seeds, positions = case(20_000, rows=32)
    got = sample(logits, temperature, seeds, positions)
    assert_same(got, sample(logits, temperature, seeds, positions, backend="reference"))
    assert got.unique().numel() > 8


def test_a_draw_depends_on_its_own_row_only() -> None:
    logits, temperature, seeds, positions = case(20_000)
    whole = sample(logits, temperature, seeds, positions)
    order = torch.arange(ROWS).flip(0)
    flipped = sample(logits[order], temperature[order], seeds[order], positions[order])
    assert_same(flipped[order], whole, "flipped")
    for count in (1, 2, 3):
        _cpu.set_threads(count)
        try:
            single = [
                sample(logits[r : r + 1], temperature[r : r + 1], seeds[r : r + 1], positions[r : r + 1])
                for r in range(0, ROWS, 16)
            ]
        finally:
            _cpu.set_threads(0)
        assert_same(torch.cat(single), whole[::16], f"{count} threads")


@pytest.mark.parametrize("temperature", [0.2, 0.7, 1.0, 1.3, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    draws, vocabulary = 60_000, 12
    g = torch.Generator().manual_seed(11)
    row = torch.randn(vocabulary, generator=g)
    logits = row.expand(draws, vocabulary).contiguous()
    many_ids, one_id = torch.arange(draws), torch.full((draws,), 5)
    for seeds, positions in ((one_id, many_ids), (many_ids, one_id)):
        tokens = sample(logits, temperature, seeds, positions)
        expected = draws * torch.softmax(row.double() / temperature, dim=0)
        seen = torch.bincount(tokens, minlength=vocabulary)
        many = expected >= 5
        chi_square = ((seen - expected).square() / expected)[many].sum()
        # 99.99 % of chi-square with 11 degrees of freedom lies below 37.4
        assert chi_square < 37.4
        assert seen[~many].sum() <= 5 * many.logical_not().sum() + 10


def test_a_wrong_temperature_would_fail_that_test() -> None:
    draws = 60_000
    row = torch.randn(12, generator=torch.Generator().manual_seed(11))
    tokens = sample(row.expand(draws, 12).contiguous(), 0.75, torch.arange(draws), torch.zeros(draws).long())
    expected = draws * torch.softmax(row.double() / 0.7, dim=0)
    assert ((torch.bincount(tokens, minlength=12) - expected).square() / expected).sum() > 37.4


def test_the_ends_of_the_random_range() -> None:
    q, i = [1 << 23, 1 << 23, 3 << 22, 1 << 23], [-100, 2, 2, -70]
    assert reference.draw(q, i, top=0, bits=0) == 1, "a dropped term is never drawn"
    assert reference.draw(q, i, top=0, bits=2**64 - 1) == 2
    assert reference.draw([1 << 23] * 2, [0, 0], top=0, bits=2**63) == 1, "half of the range: r equals the first term"
    assert reference.draw([1 << 23] * 2, [0, 0], top=0, bits=2**63 - 1) == 0


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.full((4, 40), -1.0)
    logits[0, [7, 30]] = 2.0
    logits[1] = -5.0
    logits[2, [3, 4]] = torch.tensor([-0.0, 0.0])
    logits[3, 39] = 9.0
    zeros = torch.zeros(4, dtype=torch.int64)
    for backend in ("cpu", "reference"):
        tokens, logp = sample_and_logprob(logits, 0.0, zeros, zeros, backend=backend)
        assert tokens.tolist() == [7, 0, 3, 39]
        assert_same(logp, logprob(logits, tokens))


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((20_000, 9), -INF)
    logits[:, 2], logits[:, 6] = 1.0, -40.0
    tokens = sample(logits, 2.0, torch.arange(20_000), torch.arange(20_000))
    assert set(tokens.tolist()) == {2}


def test_the_log_probability_is_that_of_logprob() -> None:
    logits, temperature, seeds, positions = case(512)
    tokens, logp = sample_and_logprob(logits, temperature, seeds, positions)
    assert_same(logp, logprob(logits, tokens, torch.where(temperature == 0, 1.0, temperature)))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("value", [float("nan"), INF, 1e30])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_distribution_is_refused(backend: str, value: float, temperature: float) -> None:
    logits, ids = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    logits[1, 2] = value
    with pytest.raises(ValueError, match="row 1 has no distribution"):
        sample(logits, temperature, ids, ids, backend=backend)
    with pytest.raises(ValueError, match="row 0 has no distribution"):
        sample(torch.full((3, 4), -INF), temperature, ids, ids, backend=backend)


def test_bad_calls_are_named() -> None:
    logits, ids = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"seeds must be contiguous int64 \[2\]"):
        sample(logits, 1.0, ids.int(), ids)
    with pytest.raises(ValueError, match=r"positions must be contiguous int64 \[2\]"):
        sample(logits, 1.0, ids, ids[:1])
    with pytest.raises(ValueError, match="temperature must be positive"):
        sample(logits, -0.5, ids, ids)


def test_no_rows_give_no_tokens() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert sample(torch.zeros(0, 4), 1.0, none, none).shape == (0,)
    assert logprob(torch.zeros(0, 4), none).shape == (0,)
