"""Log-probabilities from logits: kernels against the definition by bits, order-free by construction."""

import itertools

import pytest
import torch

from samebits import _cpu
from samebits.bits import assert_same, first_difference
from samebits.ops.logprob import finish, finish_logp, logprob, lse_state, merge_states, reference, score

ROWS = 256
INSTRUCTION_SETS = ("scalar", "avx2", "best")
VOCABULARIES = [1, 2, 7, 16, 500, 512, 1111]
TEMPERATURES = [0.2, 0.7, 1.0, 1.3, 2.0]
NAN, INF = float("nan"), float("inf")


def logits_of(vocabulary: int, rows: int = ROWS, seed: int = 0) -> torch.Tensor:
    """Rows from nearly flat to extremely peaked, some columns -inf."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=g) * torch.logspace(-2, 2.5, rows)[:, None]
    logits[torch.rand(rows, vocabulary, generator=g) < 0.02] = -INF
    return logits


def targets_of(vocabulary: int, rows: int = ROWS, each: int = 3) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randint(-1, vocabulary + 1, (rows, each), generator=g)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_kernel_gives_the_reference_bits(vocabulary: int, instruction_set) -> None:
    logits, targets = logits_of(vocabulary), targets_of(vocabulary)
    odd = [NAN, INF, 4e8, -4e8, -3e8, 3e8, 1e38, -1e38, -0.0, 1e-40]
    logits[: len(odd), 0] = torch.tensor(odd)
    for temperature in (TEMPERATURES[0], 1.0, torch.linspace(0.1, 3, ROWS)):
        states = lse_state(logits, temperature, backend="reference")
        lse = finish(states, backend="reference")
        logp = logprob(logits, targets, temperature, backend="reference")
        for isa in INSTRUCTION_SETS:
            instruction_set(isa)
            assert_same(lse_state(logits, temperature), states, f"{isa}: states")
            assert_same(finish(states), lse, f"{isa}: lse")
            assert_same(logprob(logits, targets, temperature), logp, f"{isa}: logp")


def test_a_score_is_the_log_probability_of_one_target_a_row() -> None:
    logits, targets, temperature = logits_of(512), targets_of(512)[:, 0].contiguous(), torch.linspace(0.1, 3, ROWS)
    assert_same(score(logits, targets, temperature), logprob(logits, targets, temperature), "scores")
    assert first_difference(score(logits, targets, temperature + 1), logprob(logits, targets, temperature)) is not None
    with pytest.raises(ValueError, match="score: targets must be contiguous int64"):
        score(logits, targets_of(512), temperature)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_order_and_partition_never_show(temperature: float) -> None:
    logits = logits_of(32_000)
    whole = lse_state(logits, temperature)
    g = torch.Generator().manual_seed(7)
    order = torch.randperm(logits.shape[1], generator=g)
    assert_same(lse_state(logits[:, order].contiguous(), temperature), whole, "permuted")
    cuts = [0, 1, 17, 8192, 16_000, 31_999, 32_000]
    parts = [lse_state(logits[:, a:b], temperature) for a, b in itertools.pairwise(cuts)]
    assert_same(merge_states(parts), whole, "parts")
    assert_same(merge_states(parts[::-1]), whole, "parts reversed")
    assert_same(merge_states([merge_states(parts[:3]), merge_states(parts[3:])]), whole, "tree of parts")


def test_a_large_vocabulary_gives_the_reference_bits() -> None:
    logits = logits_of(8_500)
    assert_same(lse_state(logits, 0.7), lse_state(logits, 0.7, backend="reference"))


def test_columns_of_minus_infinity_change_nothing() -> None:
    logits = logits_of(500)
    logits[:, 3] = 0.0
    padded = torch.cat([logits, torch.full((ROWS, 12), -INF)], dim=1)
    assert_same(lse_state(padded), lse_state(logits))


@pytest.mark.parametrize("vocabulary", [512, 32_000])
def test_rows_do_not_depend_on_batch_or_threads(vocabulary: int) -> None:
    logits, targets = logits_of(vocabulary), targets_of(vocabulary)
    whole = logprob(logits, targets, 0.7)
    for count in (1, 2, 3):
        _cpu.set_threads(count)
        try:
            assert_same(logprob(logits, targets, 0.7), whole, f"{count} threads")
            rows = [logprob(logits[r : r + 1], targets[r : r + 1], 0.7) for r in range(0, ROWS, 16)]
        finally:
            _cpu.set_threads(0)
        assert_same(torch.cat(rows), whole[::16], f"single rows, {count} threads")


def test_strided_logits_give_the_same_bits() -> None:
    logits, targets = logits_of(512), targets_of(512)
    wide = torch.full((ROWS, 700), NAN)
    wide[:, 40:552] = logits
    assert_same(logprob(wide[:, 40:552], targets), logprob(logits, targets))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_close_to_float64(temperature: float) -> None:
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, 32_000, generator=g) * torch.linspace(0.1, 12, ROWS)[:, None]
    targets = torch.cat([logits.argmax(1, keepdim=True), torch.randint(0, 32_000, (ROWS, 4), generator=g)], 1)
    z = (logits / torch.tensor(temperature)).double()
    exact = torch.log_softmax(z, dim=1).gather(1, targets)
    error = (logprob(logits, targets, temperature).double() - exact).abs()
    # half a unit in the last place, plus what the polynomial and the 24-bit terms leave
    assert (error - exact.abs() * 2**-24).max() < 1.2e-7
    total = torch.logsumexp(z, 1)
    error = (finish(lse_state(logits, temperature)).double() - total).abs()
    assert (error - total.abs() * 2**-24).max() < 1.2e-7


def test_a_probability_never_exceeds_one() -> None:
    g = torch.Generator().manual_seed(4)
    logits = torch.randn(4096, 1, generator=g) * 30
    logp = logprob(logits, torch.zeros(4096, dtype=torch.int64), 0.7)
    assert ((logp <= 0) & (logp > -2e-7)).all()


@pytest.mark.parametrize(
    ("row", "lse", "logp"),
    [
        ([NAN, 1.0], NAN, [NAN, NAN]),
        ([INF, 1.0], NAN, [NAN, NAN]),
        ([-INF, -INF], -INF, [NAN, NAN]),
        ([-INF, 3.0], 3.0, [-INF, -1.672817e-9]),
        ([1e30, 2.0], NAN, [NAN, NAN]),
        ([-1e30, -1e30], -INF, [NAN, NAN]),
        ([3e8, 2.0], 3e8, [-1.192093e-07, -3e8]),
        ([-3e38, 2.0], 2.0, [-3e38, 0.0]),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_values_without_a_softmax(row: list[float], lse: float, logp: list[float], backend: str) -> None:
    logits = torch.tensor([row])
    got = logprob(logits, torch.tensor([[0, 1]]), backend=backend)
    torch.testing.assert_close(got, torch.tensor([logp]), equal_nan=True, rtol=1e-6, atol=2e-8)
    total = finish(lse_state(logits, backend=backend), backend=backend)
    torch.testing.assert_close(total, torch.tensor([lse]), equal_nan=True, rtol=1e-6, atol=0)
    for value in (got, total):
        nans = value.view(torch.int32)[value.isnan()]
        assert (nans == 0x7FC00000).all()


def test_a_target_that_is_no_column_gives_zero() -> None:
    logits = logits_of(16)
    targets = torch.tensor([-100, -1, 16, 2**62, -(2**63)]).expand(ROWS, 5).contiguous()
    assert_same(logprob(logits, targets), torch.zeros(ROWS, 5))


def test_states_and_targets_give_the_same_log_probability() -> None:
    logits, temperature = logits_of(512), 1.3
    targets = torch.arange(ROWS)
    z = (logits / torch.tensor(temperature)).gather(1, targets[:, None])[:, 0]
    assert_same(finish_logp(lse_state(logits, temperature), z), logprob(logits, targets, temperature))


def test_an_overflowing_merge_is_refused() -> None:
    state = torch.tensor([[0, 1 << 61, 0, 0, 0]])
    with pytest.raises(ValueError, match="62 bits"):
        merge_states([state, state])


def test_faults_are_noticed() -> None:
    logits, targets = logits_of(512), targets_of(512)
    states = lse_state(logits, 0.7)
    q, i = reference.terms(logits / torch.tensor(0.7))
    window = i >> 4
    top = window.amax(1, keepdim=True)
    sums = [torch.where(window == top - k, q << (i & 15), 0).sum(1, keepdim=True) for k in range(3)]
    missing = torch.cat([top, *sums, torch.zeros_like(top)], dim=1)
    assert first_difference(missing, states) is not None
    good = logprob(logits, targets, 0.7)
    assert first_difference(logprob(logits / torch.tensor(0.7), targets, 0.7), good) is not None
    padded = torch.cat([logits, torch.zeros(ROWS, 4)], dim=1)
    assert first_difference(lse_state(padded, 0.7), states) is not None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, t: logprob(x.bfloat16(), t), "logits must be float32"),
        (lambda x, t: logprob(x.t(), t), "adjacent"),
        (lambda x, t: logprob(x, t.int()), "targets must be contiguous int64"),
        (lambda x, t: logprob(x, t, 0.0), "temperature must be positive"),
        (lambda x, t: logprob(x, t, torch.tensor([1.0, -1.0])), "got -1.0 in row 1"),
        (lambda x, t: logprob(x, t, torch.ones(3)), "contiguous float32"),
        (lambda x, t: logprob(x.clone().requires_grad_(), t), "no gradient flows"),
        (lambda x, t: lse_state(torch.zeros(1, 2**20 + 1)), "merge states"),
        (lambda x, t: logprob(x, t, backend="cuda"), "no backend 'cuda'"),
    ],
)
def test_bad_calls_are_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
