"""The samebits provider: the op's own bits, exact values, the right gradients, and never [T, V]."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scoring import HIDDEN, PADDED, REAL, ROWS, context, exact, request

from samebits.bits import assert_same, first_difference
from samebits.linear_logp import (
    LinearLogp,
    LinearLogpContext,
    LinearLogpProviderUnavailable,
    LinearLogpRequest,
    LinearProjection,
    ProviderSettings,
    VocabPartition,
)
from samebits.linear_logp.provider import CONTRACT_ID, provider
from samebits.linear_logp.select import OWN_PROVIDER
from samebits.ops.logprob import linear_logp

MANY = 300


def head(asked: LinearLogpRequest) -> dict[str, Any]:
    assert asked.context is not None
    projection = asked.context.projection
    return {"weight": projection.weight, "bias": projection.bias, "real_vocab": asked.context.vocab_partition.real_size}


def op_bits(asked: LinearLogpRequest, **changes: Any) -> torch.Tensor:
    """What the op gives for all rows of a request."""
    assert asked.context is not None
    return linear_logp(
        asked.context.hidden, targets=asked.target_ids, temperature=asked.temperature, **head(asked), **changes
    )


def gradients(asked: LinearLogpRequest, output: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(output, list(asked.differentiable_inputs().values()), torch.ones_like(output)))


def test_the_ops_own_bits_and_gradients() -> None:
    asked = request(MANY, temperature=0.7)
    logp = provider(asked).logp
    assert logp.shape == (MANY, 1)
    assert_same(logp[:, 0], op_bits(asked), "log-probabilities")
    for ours, theirs in zip(gradients(asked, logp), gradients(asked, op_bits(asked)), strict=True):
        assert_same(ours, theirs, "gradients")


def test_strict_mode_accepts_it_under_its_contract() -> None:
    settings = ProviderSettings(path=OWN_PROVIDER, mode="strict", expected_contract=CONTRACT_ID)
    asked = request(with_entropy=True, with_entropy_grad=True)
    logp, entropy = LinearLogp(settings)(asked, lambda _: (_ for _ in ()).throw(AssertionError("native was called")))
    assert_same(logp, provider(asked).logp)
    assert entropy is not None
    assert not any(part in CONTRACT_ID for part in ("tp", "cp", str(PADDED)))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_temperature_is_applied_exactly_once(temperature: float) -> None:
    asked = request(MANY, temperature=temperature)
    error = provider(asked).logp[:, 0].double() - exact(asked).gather(1, asked.target_ids[:, None])[:, 0]
    assert float(error.detach().abs().max()) < 1e-5


def test_one_temperature_per_row_is_that_rows_own() -> None:
    temperatures = torch.linspace(0.5, 2.0, MANY)
    every = provider(request(MANY, temperature=temperatures)).logp
    for row in (0, 7, MANY - 1):
        alone = provider(request(MANY, temperature=float(temperatures[row]))).logp
        assert_same(every[row], alone[row])
    assert first_difference(every, provider(request(MANY)).logp) is not None


def test_temperatures_stay_with_their_rows_when_others_are_inactive() -> None:
    temperatures, active = torch.linspace(0.5, 2.0, MANY), torch.arange(MANY) % 3 != 0
    every = provider(request(MANY, temperature=temperatures)).logp
    assert_same(provider(request(MANY, temperature=temperatures, active=active)).logp[active], every[active])


def test_inactive_rows_are_zero_get_no_gradient_and_may_hold_garbage() -> None:
    active = torch.arange(MANY) % 3 != 0
    plain = request(MANY)
    hidden = plain.context.hidden.detach().clone()  # type: ignore[union-attr]
    hidden[~active] = float("nan")
    targets = torch.where(active, plain.target_ids, -99)
    source = plain.context
    assert source is not None
    poisoned = LinearLogpContext(hidden.requires_grad_(), source.projection, source.vocab_partition)
    asked = request(target_ids=targets, context=poisoned, active=active, with_entropy=True)
    result = provider(asked)
    assert_same(result.logp[active], provider(plain).logp[active])
    assert_same(result.logp[~active], torch.zeros(100, 1))
    assert result.entropy is not None
    assert_same(result.entropy[~active], torch.zeros(100))
    (gradient,) = torch.autograd.grad(result.logp.sum(), [hidden])
    assert_same(gradient[~active], torch.zeros(100, HIDDEN, dtype=torch.bfloat16))


def test_sums_over_tokens_follow_the_keys_not_the_packing() -> None:
    order = torch.randperm(MANY, generator=torch.Generator().manual_seed(5))
    plain = request(MANY, row_keys=torch.arange(MANY))
    source = plain.context
    assert source is not None
    shuffled = request(
        target_ids=plain.target_ids[order],
        context=LinearLogpContext(source.hidden[order], source.projection, source.vocab_partition),
        row_keys=order,
    )
    weight = source.projection.weight
    here = torch.autograd.grad(provider(plain).logp.sum(), [weight])[0]
    there = torch.autograd.grad(provider(shuffled).logp.sum(), [weight])[0]
    assert_same(here, there, "weight gradient")


def test_an_active_target_that_is_no_token_is_refused() -> None:
    for target in (-1, REAL):
        with pytest.raises(ValueError, match=f"target {target}"):
            provider(request(target_ids=torch.full((ROWS,), target)))


def test_padded_columns_take_no_part() -> None:
    plain = request(MANY)
    source = plain.context
    assert source is not None
    loud = source.projection.weight.detach().clone()
    loud[REAL:] = 100.0
    other = LinearLogpContext(source.hidden, LinearProjection(loud, source.projection.bias), source.vocab_partition)
    changed, same = (
        provider(request(MANY, context=other, with_entropy=True)),
        provider(request(MANY, with_entropy=True)),
    )
    assert_same(changed.logp, same.logp)
    assert changed.entropy is not None
    assert same.entropy is not None
    assert_same(changed.entropy, same.entropy)


def as_mask(kept: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(MANY, PADDED, dtype=torch.bool)
    return mask.scatter(1, kept, True)


def test_a_kept_support_renormalises_and_always_holds_the_target() -> None:
    kept = torch.randint(0, REAL, (MANY, 6), generator=torch.Generator().manual_seed(3))
    asked = request(MANY, kept_ids=kept, temperature=0.7)
    logp = provider(asked).logp
    z = exact(asked).masked_fill(~as_mask(kept)[:, :REAL].scatter(1, asked.target_ids[:, None], True), float("-inf"))
    error = logp[:, 0].double() - z.log_softmax(-1).gather(1, asked.target_ids[:, None])[:, 0]
    assert float(error.detach().abs().max()) < 1e-5
    assert_same(logp, provider(request(MANY, log_prob_keep_mask=as_mask(kept), temperature=0.7)).logp, "both forms")


def as_counts(kept: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = [row[row >= 0].unique() for row in kept]
    return {"kept_ids": torch.cat(rows), "kept_counts": torch.tensor([len(row) for row in rows])}


def test_a_support_may_come_row_after_row() -> None:
    kept = torch.randint(-1, REAL, (MANY, 6), generator=torch.Generator().manual_seed(3))
    kept[::5] = -1
    active = torch.arange(MANY) % 3 > 0
    changes = {"temperature": 0.7, "active": active, "row_keys": torch.arange(MANY).flip(0)}
    assert_same(
        provider(request(MANY, kept_ids=kept, **changes)).logp,
        provider(request(MANY, **as_counts(kept), **changes)).logp,
    )


def test_rows_that_keep_all_are_scored_beside_the_others() -> None:
    kept = torch.randint(0, REAL, (MANY, 6), generator=torch.Generator().manual_seed(3))
    kept[::3] = -1
    temperature = torch.linspace(0.5, 2, MANY)
    mixed = provider(request(MANY, kept_ids=kept, temperature=temperature))
    free = kept[:, 0] < 0
    assert_same(mixed.logp[free], provider(request(MANY, temperature=temperature)).logp[free])
    assert_same(
        mixed.logp[~free],
        provider(request(MANY, kept_ids=kept.clamp_min(0), temperature=temperature)).logp[~free],
    )
    assert mixed.provenance["limited_rows"] == int((~free).sum())


def test_gradients_flow_over_the_support_only() -> None:
    asked = request(kept_ids=torch.tensor([[1, 2]]).expand(ROWS, 2), target_ids=torch.full((ROWS,), 2))
    logp = provider(asked).logp
    assert asked.context is not None
    weight, bias = asked.context.projection.weight, asked.context.projection.bias
    assert bias is not None
    for gradient in torch.autograd.grad(logp.sum(), [weight, bias]):
        assert bool(gradient[1:3].any())
        assert_same(gradient[3:], torch.zeros_like(gradient[3:]))
        assert_same(gradient[:1], torch.zeros_like(gradient[:1]))


def test_unused_places_of_the_support_and_repeats_do_not_count() -> None:
    kept = torch.tensor([[1, 2, 2, -1, -1]]).expand(MANY, 5)
    assert_same(
        provider(request(MANY, kept_ids=kept)).logp,
        provider(request(MANY, kept_ids=torch.tensor([[2, 1]]).expand(MANY, 2))).logp,
    )


def test_a_support_of_everything_is_the_plain_score() -> None:
    kept = torch.arange(REAL).expand(MANY, REAL)
    assert_same(provider(request(MANY, kept_ids=kept)).logp, provider(request(MANY)).logp)


def test_the_support_never_touches_entropy() -> None:
    few = provider(request(MANY, kept_ids=torch.zeros(MANY, 1, dtype=torch.int64), with_entropy=True)).entropy
    every = provider(request(MANY, with_entropy=True)).entropy
    assert few is not None
    assert every is not None
    assert_same(few, every)


def test_entropy_and_its_gradient() -> None:
    asked = request(MANY, temperature=0.7, with_entropy=True, with_entropy_grad=True)
    entropy = provider(asked).entropy
    assert entropy is not None
    log_p = exact(asked)
    wanted = -(log_p.exp() * log_p).sum(1)
    assert float((entropy - wanted).detach().abs().max()) < 1e-5
    for ours, theirs in zip(gradients(asked, entropy), gradients(asked, wanted), strict=True):
        # two roundings to bf16 apart
        assert float((ours - theirs).abs().max()) <= 0.02 * float(theirs.abs().max())


def test_entropy_without_gradient_has_none() -> None:
    entropy = provider(request(with_entropy=True)).entropy
    assert entropy is not None
    assert not entropy.requires_grad


def in_float32(asked: LinearLogpRequest) -> LinearLogpContext:
    source = asked.context
    assert source is not None
    return LinearLogpContext(source.hidden.float(), source.projection, source.vocab_partition)


def on_another_device() -> LinearLogpRequest:
    meta: Any = {"device": "meta", "dtype": torch.bfloat16}
    source = LinearLogpContext(
        torch.zeros(ROWS, HIDDEN, **meta),
        LinearProjection(torch.zeros(PADDED, HIDDEN, **meta)),
        VocabPartition(0, PADDED, REAL, PADDED),
    )
    return request(target_ids=torch.zeros(ROWS, dtype=torch.int64, device="meta"), context=source)


def with_head(weight: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> LinearLogpRequest:
    source = request().context
    assert source is not None
    projection = LinearProjection(source.projection.weight if weight is None else weight, bias)
    return request(context=LinearLogpContext(source.hidden, projection, source.vocab_partition))


def in_parts(count: int, **changes: Any) -> LinearLogpRequest:
    source = request().context
    assert source is not None
    partition = VocabPartition(0, PADDED, REAL, PADDED, gradient_parts=count)
    return request(context=LinearLogpContext(source.hidden, source.projection, partition), **changes)


class ThreeRanks:
    def size(self) -> int:
        return 3


def without_context() -> LinearLogpRequest:
    return LinearLogpRequest(torch.zeros(ROWS, PADDED), torch.zeros(ROWS, dtype=torch.int64))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (without_context(), "no context"),
        (request(context=in_float32(request())), "serves bfloat16, hidden"),
        (on_another_device(), "serves cpu, cuda, the request is on meta"),
        (with_head(weight=torch.zeros(HIDDEN, PADDED).bfloat16().t()), "serves a contiguous weight"),
        (with_head(bias=torch.zeros(PADDED).half()), "bias of bfloat16 or float32"),
        (request(tensor_parallel_group=ThreeRanks()), "tree over 3 ranks is not balanced"),
        (in_parts(5), "tree over 5 gradient_parts is not balanced"),
        (in_parts(4, kept_ids=torch.zeros(ROWS, 1, dtype=torch.int64)), "has no gradient_parts"),
        (in_parts(4, with_entropy=True, with_entropy_grad=True), "has no gradient_parts"),
    ],
)
def test_what_it_does_not_serve_it_says(asked: LinearLogpRequest, message: str) -> None:
    with pytest.raises(LinearLogpProviderUnavailable, match=message):
        provider(asked)


def test_no_row_is_no_error() -> None:
    inactive = torch.zeros(ROWS, dtype=torch.bool)
    result = provider(
        request(target_ids=torch.full((ROWS,), -1), active=inactive, with_entropy=True, with_entropy_grad=True)
    )
    assert_same(result.logp.detach(), torch.zeros(ROWS, 1))
    assert result.entropy is not None
    (result.logp.sum() + result.entropy.sum()).backward()


def test_entropy_does_not_depend_on_the_rows_around_it() -> None:
    whole = request(MANY, with_entropy=True, with_entropy_grad=True)
    source = whole.context
    assert source is not None
    rows = slice(120, 140)
    part = LinearLogpContext(source.hidden[rows], source.projection, source.vocab_partition)
    alone = request(target_ids=whole.target_ids[rows], context=part, with_entropy=True, with_entropy_grad=True)
    here, there = provider(whole).entropy, provider(alone).entropy
    assert here is not None
    assert there is not None
    assert_same(here[rows], there)
    ours = torch.autograd.grad(here[rows].sum(), [source.hidden])[0][rows]
    assert_same(ours, torch.autograd.grad(there.sum(), [source.hidden])[0][rows])


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any torch operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def peak_elements(scoring: Any) -> int:
    with LargestTensor() as largest:
        sum(t.sum() for t in scoring()).backward()
    return largest.elements


def test_no_tensor_of_tokens_by_vocabulary_forward_or_backward() -> None:
    tokens, width, vocabulary = 256, 8, 2000
    draw = torch.Generator().manual_seed(4)
    hidden = torch.randn(tokens, width, generator=draw).bfloat16().requires_grad_()
    weight = torch.randn(vocabulary, width, generator=draw).bfloat16().requires_grad_()
    source = LinearLogpContext(hidden, LinearProjection(weight), VocabPartition(0, vocabulary, vocabulary, vocabulary))
    asked = LinearLogpRequest(None, torch.arange(tokens), context=source, with_entropy=True, with_entropy_grad=True)

    def ours() -> Any:
        result = provider(asked)
        return [result.logp, result.entropy]

    assert peak_elements(ours) <= 128 * 1024
    assert peak_elements(lambda: [(hidden @ weight.t()).float().log_softmax(-1)]) >= tokens * vocabulary


def test_contexts_of_these_tests_have_a_bias() -> None:
    assert context().projection.bias is not None
