"""The LM head with its log-probability: forward and backward against the definition, by bits."""

import itertools
import subprocess
import sys

import pytest
import torch
import torch.multiprocessing as multiprocessing

from samebits import _cpu
from samebits.bits import assert_same, first_difference
from samebits.ops.linear import matmul_f32
from samebits.ops.logprob import linear_logp, logprob, merge_states
from samebits.ops.logprob.head import BACKENDS

ROWS, DEPTH, VOCABULARY = 256, 40, 500
INSTRUCTION_SETS = ("scalar", "avx2", "best")


class Case:
    """hidden, weight, bias, targets of one random case; gradients wanted."""

    def __init__(self, vocabulary: int = VOCABULARY, rows: int = ROWS, depth: int = DEPTH) -> None:
        g = torch.Generator().manual_seed(5)
        self.hidden = torch.randn(rows, depth, generator=g).bfloat16().requires_grad_()
        self.weight = (0.5 * torch.randn(vocabulary, depth, generator=g)).bfloat16().requires_grad_()
        self.bias = torch.randn(vocabulary, generator=g).bfloat16().requires_grad_()
        self.targets = torch.randint(0, vocabulary, (rows,), generator=g)
        self.upstream = torch.randn(rows, generator=g)

    def gradients(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
        """(logp, and the gradients of hidden, weight, bias) of linear_logp with these arguments."""
        for t in (self.hidden, self.weight, self.bias):
            t.grad = None
        logp = linear_logp(self.hidden, self.weight, self.targets, *args, **kwargs)
        logp.backward(self.upstream)
        return logp.detach(), self.hidden.grad, self.weight.grad, self.bias.grad


def assert_all_same(left: tuple, right: tuple, what: str) -> None:
    for name, a, b in zip(("logp", "dhidden", "dweight", "dbias"), left, right, strict=True):
        if a is not None or b is not None:
            assert_same(a, b, f"{what}: {name}")


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.linspace(0.2, 2, ROWS)], ids=["1", "0.7", "each"])
def test_kernel_gives_the_reference_bits(temperature, instruction_set) -> None:
    case = Case()
    want = case.gradients(temperature, case.bias, backend="reference")
    for isa in INSTRUCTION_SETS:
        instruction_set(isa)
        assert_all_same(case.gradients(temperature, case.bias), want, isa)


def test_it_is_the_log_probability_of_the_linear_map() -> None:
    case = Case()
    logits = matmul_f32(case.hidden.detach(), case.weight.detach())
    want = logprob(logits, case.targets, 0.7)
    assert_same(linear_logp(case.hidden, case.weight, case.targets, 0.7).detach(), want)


@pytest.mark.parametrize("temperature", [0.2, 0.7, 1.0, 1.3, 2.0])
def test_close_to_float64(temperature: float) -> None:
    case = Case()
    got = case.gradients(temperature, case.bias)
    exact = [t.detach().double().requires_grad_() for t in (case.hidden, case.weight, case.bias)]
    logits = (exact[0] @ exact[1].t() + exact[2]) / temperature
    logp = torch.log_softmax(logits, dim=1).gather(1, case.targets[:, None])[:, 0]
    logp.backward(case.upstream.double())
    assert (got[0].double() - logp).abs().max() < 3e-6 / temperature
    for mine, theirs in zip(got[1:], exact, strict=True):
        assert (mine.double() - theirs.grad).abs().max() < 2**-7 * theirs.grad.abs().max()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_padded_columns_take_no_part(backend: str) -> None:
    case, padded = Case(), Case()
    weight = torch.full((512, DEPTH), float("nan")).bfloat16()
    weight[:VOCABULARY] = case.weight.detach()
    padded.weight = weight.requires_grad_()
    got = padded.gradients(0.7, real_vocab=VOCABULARY, backend=backend)
    want = case.gradients(0.7, backend=backend)
    assert_same(got[2][VOCABULARY:], torch.zeros(12, DEPTH).bfloat16())
    assert_all_same((*got[:2], got[2][:VOCABULARY], None), want, "padded")


def test_a_padded_column_that_counts_is_noticed() -> None:
    case = Case()
    more = torch.cat([case.weight.detach(), torch.zeros(12, DEPTH).bfloat16()])
    with_padding = linear_logp(case.hidden.detach(), more, case.targets)
    assert first_difference(with_padding, linear_logp(case.hidden, case.weight, case.targets).detach()) is not None


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_masked_rows_may_hold_anything(backend: str) -> None:
    case, masked = Case(), Case()
    keep = torch.arange(ROWS) % 3 > 0
    hidden = case.hidden.detach().clone()
    hidden[~keep] = float("nan")
    masked.hidden = hidden.requires_grad_()
    ids = torch.tensor([-100, -1, VOCABULARY, 2**40, -(2**63)])
    masked.targets = torch.where(keep, case.targets, ids[torch.arange(ROWS) % 5])
    temperature = torch.linspace(0.3, 2, ROWS)
    got = masked.gradients(temperature, backend=backend)
    assert_same(got[0][~keep], torch.zeros(int((~keep).sum())))
    assert_same(got[1][~keep], torch.zeros(int((~keep).sum()), DEPTH).bfloat16())
    case.hidden = case.hidden.detach()[keep].requires_grad_()
    case.targets, case.upstream = case.targets[keep], case.upstream[keep]
    want = case.gradients(temperature[keep], backend=backend)
    assert_all_same((got[0][keep], got[1][keep], *got[2:]), want, "masked")


def test_all_rows_masked_gives_zeros() -> None:
    case = Case()
    case.targets = torch.full((ROWS,), -100)
    logp, dhidden, dweight, _ = case.gradients()
    assert_same(logp, torch.zeros(ROWS))
    assert not dhidden.any()
    assert not dweight.any()


def test_micro_batches_continue_the_weight_gradient() -> None:
    def accumulate(cuts: list[int]) -> torch.Tensor:
        case = Case()
        case.weight.main_grad = torch.zeros(VOCABULARY, DEPTH)
        for a, b in itertools.pairwise(cuts):
            logp = linear_logp(case.hidden[a:b], case.weight, case.targets[a:b], 0.7)
            logp.backward(case.upstream[a:b])
        assert case.weight.grad_added_to_main_grad
        return case.weight.main_grad

    whole = accumulate([0, ROWS])
    assert_same(accumulate([0, 1, 100, 200, ROWS]), whole)
    assert_same(whole.bfloat16(), Case().gradients(0.7)[2])


def test_schedules_do_not_show() -> None:
    case = Case(vocabulary=5000)  # more than two slabs of the backward pass
    want = case.gradients(0.7, case.bias)
    for count in (1, 2, 3):
        _cpu.set_threads(count)
        try:
            assert_all_same(case.gradients(0.7, case.bias), want, f"{count} threads")
        finally:
            _cpu.set_threads(0)
    rows = [linear_logp(case.hidden[r : r + 1], case.weight, case.targets[r : r + 1], 0.7) for r in range(0, ROWS, 9)]
    assert_same(torch.cat(rows), linear_logp(case.hidden, case.weight, case.targets, 0.7)[::9])


def test_parts_of_the_vocabulary_merge_to_the_whole() -> None:
    case = Case()
    hidden, weight = case.hidden.detach(), case.weight.detach()
    linear_state = BACKENDS["cpu"].linear_state
    whole = linear_state(hidden, weight, None, case.targets, 0.7, "fma32")
    cuts = [0, 16, 250, 251, VOCABULARY]
    parts = [
        linear_state(hidden, weight[a:b], None, case.targets - a, 0.7, "fma32") for a, b in itertools.pairwise(cuts)
    ]
    assert_same(merge_states([p[:, :5] for p in parts]), whole[:, :5])
    assert_same(torch.stack([p[:, 5] for p in parts]).amax(0), whole[:, 5])


def test_float32_hidden_keeps_its_gradient_unrounded() -> None:
    case, wide = Case(), Case()
    wide.hidden = case.hidden.detach().float().requires_grad_()
    got, want = wide.gradients(0.7), case.gradients(0.7)
    assert got[1].dtype == torch.float32
    assert first_difference(got[1], want[1].float()) is not None
    assert_all_same((got[0], got[1].bfloat16(), *got[2:]), want, "rounded afterwards")


def test_parts_of_the_gradient_add_along_a_tree() -> None:
    """The last two of four parts are padding alone."""
    case, impl = Case(vocabulary=1024), BACKENDS["cpu"]
    case.targets %= VOCABULARY
    hidden = case.hidden.detach().float().requires_grad_()
    logp = linear_logp(hidden, case.weight, case.targets, real_vocab=VOCABULARY, gradient_parts=4)
    logp.backward(case.upstream)
    rows, weight = case.hidden.detach(), case.weight.detach()
    whole = impl.linear_state(rows, weight[:VOCABULARY], None, case.targets, 1.0, "fma32")
    lse = impl.lse(whole[:, :5].contiguous())
    first, second = (
        impl.linear_backward(
            case.upstream, rows, weight[start:end], None, case.targets - start, 1.0, lse, None, None, "fma32"
        )
        for start, end in ((0, 256), (256, VOCABULARY))
    )
    assert_same(hidden.grad, first + second)
    once = case.hidden.detach().float().requires_grad_()
    linear_logp(once, case.weight, case.targets, real_vocab=VOCABULARY).backward(case.upstream)
    assert first_difference(once.grad, hidden.grad) is not None
    with pytest.raises(ValueError, match="gradient_parts must be a power of two that divides 1024 rows"):
        linear_logp(hidden, case.weight, case.targets, gradient_parts=3)


def _rank(rank: int, address: str, results: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    case = Case(vocabulary=512)
    start = rank * 256
    case.weight = case.weight.detach()[start : start + 256].clone().requires_grad_()
    case.hidden = case.hidden.detach().float().requires_grad_()
    group = torch.distributed.group.WORLD
    got = case.gradients(0.7, vocab_start=start, group=group, real_vocab=VOCABULARY)
    torch.save(got[:3], f"{results}/{rank}")
    torch.distributed.destroy_process_group()


def test_two_ranks_give_the_bits_of_one(tmp_path) -> None:
    multiprocessing.spawn(_rank, args=(f"file://{tmp_path}/meet", str(tmp_path)), nprocs=2)
    left, right = (torch.load(tmp_path / str(r)) for r in range(2))
    case = Case(vocabulary=512)
    case.hidden = case.hidden.detach().float().requires_grad_()
    logp, dhidden, dweight, _ = case.gradients(0.7, real_vocab=VOCABULARY)
    assert_same(left[0], logp)
    assert_same(right[0], logp)
    assert_same(torch.cat([left[2], right[2]]), dweight)
    assert ((left[1] + right[1]) - dhidden).abs().max() < 1e-5 * dhidden.abs().max()


def test_a_target_that_no_rank_holds_is_refused() -> None:
    case = Case()
    with pytest.raises(ValueError, match="no rank holds the target of active row"):
        linear_logp(case.hidden, case.weight, case.targets, vocab_start=100, real_vocab=700)


def test_a_bias_may_have_any_stride() -> None:
    case = Case()
    offset = torch.randn(VOCABULARY, 2, generator=torch.Generator().manual_seed(3))[:, 1]
    want = case.gradients(0.7, offset.contiguous())
    assert_all_same(case.gradients(0.7, offset), want, "every second number")


def test_a_nan_is_a_nan_in_both_forms_of_hidden_states() -> None:
    case = Case()
    hidden = case.hidden.detach().clone()
    hidden[7, 3] = torch.nan
    want = linear_logp(hidden, case.weight, case.targets)
    assert want.isnan().nonzero().tolist() == [[7]]
    assert_same(linear_logp(hidden.float(), case.weight, case.targets), want)


MEMORY = """
import resource, torch
from samebits.ops.logprob import linear_logp
hidden = torch.randn(512, 16).bfloat16().requires_grad_()
weight = torch.randn(151_936, 16).bfloat16().requires_grad_()
weight.main_grad = torch.zeros(151_936, 16)
targets = torch.arange(512)
linear_logp(hidden[:1], weight, targets[:1]).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
linear_logp(hidden, weight, targets).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_logits_are_never_all_in_memory() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 60_000, "KiB more than a one-row call; [512, 151936] fp32 would be 304,000"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(5, 4)}, "weight must be contiguous bfloat16"),
        ({"hidden": torch.zeros(2, 3).bfloat16()}, r"hidden must be \[T, 4\]"),
        ({"hidden": torch.full((2, 4), 1.0001)}, "must hold bfloat16 values"),
        (
            {"targets": torch.zeros(2, 1, dtype=torch.int64)},
            r"targets must be contiguous int64 \[2\], got torch.int64 \[2, 1\]",
        ),
        ({"bias": torch.zeros(4)}, "bias must be"),
        ({"temperature": -1.0}, "temperature must be positive"),
    ],
)
def test_bad_calls_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    arguments = {
        "hidden": torch.zeros(2, 4).bfloat16(),
        "weight": torch.zeros(5, 4).bfloat16(),
        "targets": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        linear_logp(**(arguments | change))
