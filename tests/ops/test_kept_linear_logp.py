"""The LM head over a support: kernels against the definition, ranks, gradients on kept columns only."""

from __future__ import annotations

import pytest
import torch

from samebits.bits import assert_same
from samebits.ops.linear import matmul_f32
from samebits.ops.logprob import linear_logp
from samebits.ops.sample_support import Kept, Limits, kept_linear_logp, kept_logprob, sample_kept, sample_support

ROWS, HIDDEN, VOCABULARY = 256, 40, 700


class Problem:
    """Hidden states, an LM head with bias, and supports of very different sizes, the targets inside."""

    def __init__(self, vocabulary: int = VOCABULARY, rows: int = ROWS) -> None:
        g = torch.Generator().manual_seed(vocabulary)
        self.hidden = torch.randn(rows, HIDDEN, generator=g).bfloat16()
        self.weight = (0.3 * torch.randn(vocabulary, HIDDEN, generator=g)).bfloat16()
        self.bias = torch.randn(vocabulary, generator=g).bfloat16()
        self.temperature = torch.linspace(0.5, 9, rows)
        self.logits = matmul_f32(self.hidden, self.weight, self.bias)
        top_p = 0.2 + 0.79 * torch.rand(rows, generator=g)
        limits = Limits(torch.randint(1, vocabulary, (rows,), generator=g), top_p, torch.zeros(rows))
        self.kept = sample_support(self.logits, self.temperature, limits)
        seeds = torch.randint(0, 2**62, (rows,), generator=g)
        self.targets, self.rollout = sample_kept(
            self.logits, self.temperature, seeds, torch.zeros(rows).long(), self.kept
        )
        self.upstream = torch.randn(rows, generator=g)

    def run(self, backend: str = "cpu", rows: slice = slice(None), parts: int = 1, **changes: object) -> list:
        """[logp, gradient of hidden, fp32 main_grad of weight and bias] with the vocabulary in `parts` pieces."""
        index = torch.arange(ROWS)[rows]
        hidden = self.hidden[rows].float().requires_grad_()
        weight, bias = (t.clone().requires_grad_() for t in (self.weight, self.bias))
        for leaf in (weight, bias):
            leaf.main_grad = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(6))
        kept = changes.get("kept", self.kept.select(index))
        logp = kept_linear_logp(
            hidden, weight, self.targets[rows], kept, self.temperature[rows], bias, backend=backend,
        )  # fmt: skip
        logp.backward(self.upstream[rows])
        return [logp.detach(), hidden.grad, weight.main_grad, bias.main_grad]


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem()


@pytest.fixture(scope="module")
def wanted(problem: Problem) -> list:
    return problem.run("reference")


def test_supports_differ_in_size(problem: Problem) -> None:
    assert int(problem.kept.counts.min()) < 4
    assert int(problem.kept.counts.max()) > 512, "more than a block of columns"


def test_kernels_give_the_bits_of_the_definition(problem: Problem, wanted: list, instruction_set) -> None:
    for isa in ("scalar", "avx2", "best"):
        instruction_set(isa)
        for name, got, right in zip(("logp", "dhidden", "dw", "dbias"), problem.run(), wanted, strict=True):
            assert_same(got, right, f"{isa}: {name}")


def test_the_trainer_scores_what_the_sampler_scored(problem: Problem, wanted: list) -> None:
    assert_same(wanted[0], problem.rollout)
    scored = kept_logprob(problem.logits, problem.targets[:, None], problem.temperature, problem.kept)
    assert_same(scored[:, 0], problem.rollout)


def test_gradients_reach_kept_columns_only(problem: Problem, wanted: list) -> None:
    before = torch.randn(problem.weight.shape, generator=torch.Generator().manual_seed(6))
    touched = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, problem.kept.ids, True)
    first = problem.run(rows=slice(0, 4))
    few = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, problem.kept.select(torch.arange(4)).ids, True)
    assert not bool(few.all())
    assert_same(first[2][~few], before[~few])
    assert not torch.equal(wanted[2][touched], before[touched])


def test_gradients_against_autograd_in_float64(problem: Problem, wanted: list) -> None:
    hidden, weight, bias = (t.double().requires_grad_() for t in (problem.hidden, problem.weight, problem.bias))
    z = (hidden @ weight.t() + bias) / problem.temperature[:, None].double()
    mask = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool)
    mask[problem.kept.owners(), problem.kept.ids] = True
    logp = z.masked_fill(~mask, float("-inf")).log_softmax(1).gather(1, problem.targets[:, None])[:, 0]
    torch.testing.assert_close(wanted[0].double(), logp.detach(), atol=5e-6, rtol=0)
    logp.backward(problem.upstream.double())
    before = torch.randn(problem.weight.shape, generator=torch.Generator().manual_seed(6))
    torch.testing.assert_close(wanted[1].double(), hidden.grad, atol=0.02, rtol=0.02)
    torch.testing.assert_close((wanted[2] - before).double(), weight.grad, atol=0.05, rtol=0.02)


def test_a_support_of_all_is_no_support(problem: Problem) -> None:
    everything = Kept.of([list(range(VOCABULARY))] * ROWS)
    got = problem.run(kept=everything)
    hidden = problem.hidden.float().requires_grad_()
    weight, bias = (t.clone().requires_grad_() for t in (problem.weight, problem.bias))
    for leaf in (weight, bias):
        leaf.main_grad = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(6))
    logp = linear_logp(hidden, weight, problem.targets, problem.temperature, bias)
    logp.backward(problem.upstream)
    for name, a, b in zip(
        ("logp", "dhidden", "dw", "dbias"), got, (logp.detach(), hidden.grad, weight.main_grad, bias.main_grad),
        strict=True,
    ):  # fmt: skip
        assert_same(a, b, name)


def test_rows_alone_and_in_pieces_give_the_same_gradients(problem: Problem, wanted: list) -> None:
    for r in range(0, ROWS, 37):
        alone = problem.run(rows=slice(r, r + 1))
        assert_same(alone[0], wanted[0][r : r + 1], f"row {r}")
        assert_same(alone[1], wanted[1][r : r + 1], f"row {r}: dhidden")
    weight = problem.weight.clone().requires_grad_()
    weight.main_grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(6))
    for piece in torch.arange(ROWS).split(100):
        logp = kept_linear_logp(
            problem.hidden[piece], weight, problem.targets[piece], problem.kept.select(piece),
            problem.temperature[piece], problem.bias,
        )  # fmt: skip
        logp.backward(problem.upstream[piece])
    assert_same(weight.main_grad, wanted[2], "micro-batches")


def test_a_target_outside_its_support_is_refused(problem: Problem) -> None:
    with pytest.raises(ValueError, match=r"target 5 of row 0 is not in its support"):
        kept_linear_logp(problem.hidden[:1], problem.weight, torch.tensor([5]), Kept.of([[1, 2]]))
    with pytest.raises(ValueError, match="row 1 keeps all ids"):
        kept_linear_logp(problem.hidden[:2], problem.weight, torch.tensor([1, 1]), Kept.of([[1, 2], []]))
    with pytest.raises(ValueError, match="no rank holds the target of row 0"):
        kept_linear_logp(problem.hidden[:1], problem.weight, torch.tensor([900]), Kept.of([[1, 900]]))
