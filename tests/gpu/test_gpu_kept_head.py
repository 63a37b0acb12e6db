"""The LM head over supports on a GPU, and the provider that asks for it, against the definition on the CPU.

python -m pytest tests/gpu/test_gpu_kept_head.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from kept_head_problem import Problem

from samebits.backends import device_arithmetic
from samebits.bits import assert_same, first_difference
from samebits.linear_logp import LinearLogpContext, LinearLogpRequest, LinearProjection, VocabPartition
from samebits.linear_logp.provider import provider
from samebits.ops.linear import matmul_f32
from samebits.ops.logprob import BACKENDS as LOGPROB_BACKENDS
from samebits.ops.sample_support import Kept, Limits, kept_linear_logp, sample_kept, sample_support

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: run `python -m pytest tests/gpu` on a machine with one"
)
ROWS, HIDDEN, VOCABULARY = 320, 136, 600
OUTPUTS = ("logp", "dhidden", "dweight", "dbias")
KINDS = ("fma32", "sm90")


def served(kind: str) -> str:
    own = device_arithmetic(torch.device("cuda", 0))
    if kind not in ("fma32", own):
        pytest.skip(f"this device computes in {own}, not in {kind}")
    return kind


@pytest.fixture(scope="module")
def problem() -> Problem:
    longer = {20: VOCABULARY, 30: 15, 31: 16, 32: 17, 33: 33, 34: 100, 35: VOCABULARY - 1}
    return Problem(ROWS, HIDDEN, VOCABULARY, most=6, longer=longer, device="cuda")


@pytest.fixture(scope="module")
def wanted(problem: Problem) -> Callable[[str], list[Tensor]]:
    """What the definition gives, once for each arithmetic."""
    known: dict[str, list[Tensor]] = {}

    def of(kind: str) -> list[Tensor]:
        if kind not in known:
            known[kind] = problem.run("reference", kind)
        return known[kind]

    return of


def assert_all_same(got: list[Tensor], want: list[Tensor], what: str = "") -> None:
    for name, a, b in zip(OUTPUTS, got, want, strict=False):
        assert_same(a, b, f"{name} {what}")


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_is_the_definitions(
    problem: Problem, wanted: Callable[[str], list[Tensor]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = wanted(served(kind))
    assert [bool(t.isnan().any()) for t in want] == [True] * 4
    assert [bool(t.isfinite().all(-1).sum() > len(t) // 2) for t in want[1:3]] == [True] * 2, "few NaN"
    assert_all_same(problem.run("triton", kind), want)
    backend = LOGPROB_BACKENDS["triton"]
    for rows, columns, places in ((8192, 256, 1 << 23), (64, 16, 1 << 23), (8192, 8448, 1300)):
        monkeypatch.setattr(backend, "TOKENS", rows)
        monkeypatch.setattr(backend, "COLUMNS", columns)
        monkeypatch.setattr("samebits.ops.sample_support.kept_head.PLACES", places)
        assert_all_same(problem.run("triton", kind), want, f"blocks of {rows} rows, {columns} columns, {places} places")


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_that_hold_half_of_the_vocabulary_each(
    problem: Problem, wanted: Callable[[str], list[Tensor]], kind: str
) -> None:
    logp, _, dweight, _ = wanted(served(kind))
    want = [logp, *problem.halves("reference", kind, weights=False)[1:], dweight]
    names = ("logp", "dhidden of rank 0", "dhidden of rank 1", "dweight")
    for name, a, b in zip(names, problem.halves("triton", kind, weights=True), want, strict=True):
        assert_same(a, b, name)


def test_a_row_does_not_depend_on_the_batch(problem: Problem) -> None:
    kind = device_arithmetic(torch.device("cuda", 0))
    whole = problem.run("triton", kind)
    for row in (0, 6, 20, 31, 35, 299):
        alone = problem.run("triton", kind, rows=slice(row, row + 1))
        assert_all_same(alone[:2], [t[row : row + 1] for t in whole[:2]], f"of row {row}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_seeded_fault_is_seen(
    problem: Problem, wanted: Callable[[str], list[Tensor]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from samebits.ops.sample_support import kept_head

    want, plain = wanted(served(kind)), kept_head._sums
    fewer = [problem.kept.row(r).tolist() for r in range(ROWS)]
    # the likeliest: without any of the last the sums are the same
    likeliest = int((problem.weight[fewer[34]].float() @ problem.hidden[34].float()).argmax())
    assert fewer[34].pop(likeliest) != problem.targets[34]
    got = problem.run("triton", kind, kept=Kept.of(fewer))
    assert all(first_difference(a, b) is not None for a, b in zip(got, want, strict=True)), "an id less"
    if kind == "fma32":
        return

    def wrong_steps(*given: Any, together: int = 32) -> None:
        plain(*given, together={1: 2, 32: 8}[together])

    monkeypatch.setattr(kept_head, "_sums", wrong_steps)
    got = problem.run("triton", kind)
    assert [first_difference(a, b) is None for a, b in zip(got, want, strict=True)] == [True, False, False, True]


def test_the_trainer_scores_what_the_sampler_scored() -> None:
    """At the width of a real model, where products have other tiles; tokens as vLLM's sampler draws them."""
    g = torch.Generator().manual_seed(5)
    rows, columns, width = 1100, 20_000, 2048
    hidden = torch.randn(rows, width, generator=g).bfloat16().cuda()
    weight = (0.1 * torch.randn(columns, width, generator=g)).bfloat16().cuda()
    logits, temperature = matmul_f32(hidden, weight), torch.linspace(0.5, 2, rows).cuda()
    kept = sample_support(logits, temperature, Limits.of(rows, top_k=500, top_p=0.95))
    seeds = torch.randint(0, 2**62, (rows,), generator=g).cuda()
    tokens, logp = sample_kept(logits, temperature, seeds, torch.zeros_like(seeds), kept)
    assert int(kept.counts.max()) > 50
    assert_same(kept_linear_logp(hidden, weight, tokens, kept, temperature), logp)


def request(device: str, **changes: Any) -> LinearLogpRequest:
    """300 rows of 37 real columns in 40, some of them inactive, one temperature each."""
    g = torch.Generator().manual_seed(1)
    hidden, weight, bias = (torch.randn(*shape, generator=g).bfloat16() for shape in ((300, 16), (40, 16), (40,)))
    hidden, weight, bias = (t.to(device).requires_grad_() for t in (hidden, weight, bias))
    source = LinearLogpContext(hidden, LinearProjection(weight, bias), VocabPartition(0, 40, 37, 40))
    given = {
        "target_ids": torch.randint(0, 37, (300,), generator=g),
        "temperature": torch.linspace(0.5, 2, 300),
        "active": torch.arange(300) % 7 > 0,
        "row_keys": torch.arange(300).flip(0),
        **changes,
    }
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    return LinearLogpRequest(None, context=source, **moved)


def answer(device: str, **changes: Any) -> list[Tensor]:
    """Log-probabilities, then entropies if asked for, and the gradients of both together."""
    asked = request(device, **changes)
    result = provider(asked)
    scores = [result.logp[:, 0]] + ([] if result.entropy is None else [result.entropy])
    mixed = sum((at + 1) * score for at, score in enumerate(scores))
    gradients = torch.autograd.grad(mixed, list(asked.differentiable_inputs().values()), torch.ones_like(mixed))
    return [t.detach().cpu() for t in (*scores, *gradients)]


def forms() -> dict[str, dict[str, Tensor]]:
    """One support in every form that a request has; the last also frees every fifth row."""
    table = torch.randint(0, 37, (300, 6), generator=torch.Generator().manual_seed(3))
    rows = [row.unique() for row in table]
    counts = torch.tensor([len(row) for row in rows])
    mask = torch.zeros(300, 40, dtype=torch.bool).scatter(1, table, True)
    some = table.clone()
    some[::5] = -1
    return {
        "table": {"kept_ids": table},
        "counts": {"kept_ids": torch.cat(rows), "kept_counts": counts},
        "mask": {"log_prob_keep_mask": mask},
        "mixed": {"kept_ids": some},
    }


@pytest.fixture
def as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the card compute in fma32, as a CPU does."""
    monkeypatch.setattr("samebits.backends.select.device_arithmetic", lambda device: "fma32")


@pytest.mark.usefixtures("as_on_a_cpu")
@pytest.mark.parametrize("form", forms())
def test_the_provider_gives_the_bits_of_a_cpu_for_every_form_of_a_support(form: str) -> None:
    pytest.importorskip("samebits._cpu", reason="the compiled CPU library is not built here")
    for name, a, b in zip(OUTPUTS, answer("cuda", **forms()[form]), answer("cpu", **forms()[form]), strict=True):
        assert_same(a, b, name)


@pytest.mark.usefixtures("as_on_a_cpu")
@pytest.mark.parametrize("temperature", [0.7, torch.linspace(0.5, 2, 300)], ids=["one", "rows"])
def test_entropies_have_the_bits_of_a_cpu(temperature: float | Tensor) -> None:
    pytest.importorskip("samebits._cpu", reason="the compiled CPU library is not built here")
    asked = {"with_entropy": True, "with_entropy_grad": True, "temperature": temperature, **forms()["table"]}
    names = ("logp", "entropy", *OUTPUTS[1:])
    for name, a, b in zip(names, answer("cuda", **asked), answer("cpu", **asked), strict=True):
        assert_same(a, b, name)


def test_entropies_in_the_cards_own_arithmetic() -> None:
    logp, entropy, *gradients = answer("cuda", with_entropy=True, with_entropy_grad=True, **forms()["mixed"])
    asked = request("cuda")
    assert asked.context is not None
    projection = asked.context.projection
    assert projection.bias is not None
    z = (asked.context.hidden.double() @ projection.weight.double().t() + projection.bias.double())[:, :37]
    log_p = (z / asked.temperature[:, None].double()).log_softmax(-1)
    wanted = -(log_p.exp() * log_p).sum(-1) * asked.active
    torch.testing.assert_close(entropy.double(), wanted.detach().cpu(), atol=5e-5, rtol=0)
    assert all(bool(t.isfinite().all()) and bool(t.any()) for t in (logp, *gradients))
