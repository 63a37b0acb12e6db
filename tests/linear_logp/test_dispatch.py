"""What each mode does with a sound provider, an absent one, a broken one and one that lies."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scoring import ROWS, context, good, is_native, native, request, settings

from samebits.bits import assert_same
from samebits.linear_logp import LinearLogp, LinearLogpRequest, LinearLogpResult, ProviderRejected, ProviderSettings

Provider = Callable[[LinearLogpRequest], Any]
WITH_ENTROPY = {"with_entropy": True, "with_entropy_grad": True}


def ask(provider: Provider, mode: str = "strict", asked: LinearLogpRequest | None = None, **changes: Any) -> Any:
    return LinearLogp(settings(provider, mode, **changes))(asked or request(), native)


def raising(error: BaseException) -> Provider:
    def provider(asked: LinearLogpRequest) -> LinearLogpResult:
        raise error

    return provider


class ForeignRefusal(KeyError):
    """Unavailable in a class that knows nothing of ours."""

    linear_logp_provider_unavailable = True


def changed(**changes: Any) -> Provider:
    return lambda asked: good(asked, **changes)


def with_logp(change: Callable[[torch.Tensor], Any]) -> Provider:
    return lambda asked: good(asked, logp=change(good(asked).logp))


def with_entropy(change: Callable[[torch.Tensor], Any]) -> Provider:
    def provider(asked: LinearLogpRequest) -> LinearLogpResult:
        entropy = good(asked).entropy
        assert entropy is not None
        return good(asked, entropy=change(entropy))

    return provider


# no provider


def test_without_a_provider_native_gets_the_request_itself() -> None:
    seen = []
    asked = request()
    scores = torch.zeros(ROWS, 1, dtype=torch.float64), None

    def own(given: LinearLogpRequest) -> Any:
        seen.append(given)
        return scores

    assert LinearLogp(ProviderSettings())(asked, own) is scores
    assert seen[0] is asked


# a sound provider


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_a_sound_result_is_returned(mode: str) -> None:
    asked = request(**WITH_ENTROPY)
    logp, entropy = ask(good, mode, asked)
    assert_same(logp, good(asked).logp)
    assert_same(entropy, good(asked).entropy)


def as_mapping(asked: LinearLogpRequest) -> Any:
    result = good(asked)
    return {"logp": result.logp, "backend_id": "torch", "contract_id": "plain.v1"}


def as_object(asked: LinearLogpRequest) -> Any:
    return SimpleNamespace(**as_mapping(asked), further="ignored")


@pytest.mark.parametrize("provider", [as_mapping, as_object])
def test_results_may_be_mappings_or_objects_without_optional_fields(provider: Provider) -> None:
    assert_same(ask(provider)[0], good(request()).logp)


def test_scoring_without_gradients_needs_none() -> None:
    with torch.no_grad():
        assert not is_native(ask(with_logp(torch.Tensor.detach)))


def test_the_identity_is_kept() -> None:
    dispatch = LinearLogp(settings(good))
    dispatch(request(), native)
    assert dispatch.identity == ("torch", "plain.v1")


# unavailability


def test_auto_goes_native_on_the_providers_word_and_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def provider(asked: LinearLogpRequest) -> LinearLogpResult:
        calls.append(asked)
        raise ForeignRefusal("no such chip")

    dispatch = LinearLogp(settings(provider, "auto"))
    assert all(is_native(dispatch(request(), native)) for _ in range(3))
    assert len(calls) == 1
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "no such chip" in caplog.text
    assert dispatch.calls == {"provider": 0, "native": 3}


def test_strict_refuses_an_unavailable_provider() -> None:
    with pytest.raises(ProviderRejected, match=r"unavailable.*no such chip") as caught:
        ask(raising(ForeignRefusal("no such chip")))
    assert isinstance(caught.value.__cause__, ForeignRefusal)


def test_a_word_that_is_not_true_is_no_unavailability() -> None:
    error = RuntimeError("confused")
    error.linear_logp_provider_unavailable = "yes"  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="confused"):
        ask(raising(error), "auto")


def test_auto_does_not_change_its_mind_after_a_provider_served() -> None:
    answers = iter([good])

    def provider(asked: LinearLogpRequest) -> LinearLogpResult:
        return next(answers, raising(ForeignRefusal("gone")))(asked)

    dispatch = LinearLogp(settings(provider, "auto"))
    dispatch(request(), native)
    with pytest.raises(ProviderRejected, match="served before"):
        dispatch(request(), native)


# bugs

BUGS = [
    ImportError("cannot import name"),
    ModuleNotFoundError("No module named 'x'", name="x"),
    AttributeError("no attribute"),
    NotImplementedError("later"),
    RuntimeError("boom"),
    ValueError("bad"),
    TypeError("worse"),
    KeyError("missing"),
    MemoryError("full"),
    AssertionError("never"),
    ZeroDivisionError("by zero"),
]


@pytest.mark.parametrize("mode", ["auto", "strict"])
@pytest.mark.parametrize("error", BUGS, ids=lambda error: type(error).__name__)
def test_a_bug_is_never_taken_for_unavailability(error: Exception, mode: str) -> None:
    with pytest.raises(type(error)) as caught:
        ask(raising(error), mode)
    assert caught.value is error


# malformed results, refused in every mode

MALFORMED: dict[str, tuple[Provider, dict[str, Any], str]] = {
    "nothing": (lambda asked: None, {}, "carries no logp"),
    "a tensor": (lambda asked: torch.zeros(ROWS, 1), {}, "carries no logp"),
    "a mapping without logp": (lambda asked: {"backend_id": "b"}, {}, "carries no logp"),
    "a mapping with a typo": (lambda asked: {"logp": 0, "contractid": "c"}, {}, "unknown keys contractid"),
    "logp is a list": (with_logp(lambda t: t.tolist()), {}, "logp must be a tensor, got list"),
    "logp without the trailing axis": (with_logp(lambda t: t[:, 0]), {}, r"logp must be \[12, 1\], got \[12\]"),
    "logp of fewer rows": (with_logp(lambda t: t[1:]), {}, r"got \[11, 1\]"),
    "logp of integers": (with_logp(lambda t: t.long()), {}, "floating point"),
    "logp elsewhere": (with_logp(lambda t: t.to("meta")), {}, "is on meta"),
    "entropy missing": (changed(entropy=None), WITH_ENTROPY, "entropy was asked for"),
    "entropy unasked": (changed(entropy=torch.zeros(ROWS)), {}, "not asked for"),
    "entropy with an axis": (with_entropy(lambda t: t[:, None]), WITH_ENTROPY, r"entropy must be \[12\]"),
    "entropy of integers": (with_entropy(lambda t: t.long()), WITH_ENTROPY, "floating point"),
    "entropy elsewhere": (with_entropy(lambda t: t.to("meta")), WITH_ENTROPY, "is on meta"),
    "backend is a number": (changed(backend_id=3), {}, "backend_id must be a string"),
    "contract is None": (changed(contract_id=None), {}, "contract_id must be a string"),
    "provenance is a list": (changed(provenance=["R"]), {}, "provenance must be a mapping"),
}


@pytest.mark.parametrize("mode", ["auto", "strict"])
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_result_is_refused_in_every_mode(name: str, mode: str) -> None:
    provider, changes, message = MALFORMED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        ask(provider, mode, request(**changes))


# what strict mode refuses besides


def one_value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: t.index_fill(0, torch.tensor([3]), value)


def only_through(name: str) -> Provider:
    """A provider whose result depends on the named input alone, as far as autograd can tell."""

    def provider(asked: LinearLogpRequest) -> LinearLogpResult:
        reached = asked.differentiable_inputs()[name]
        return good(asked, logp=good(asked).logp.detach() + 0 * reached.float().sum())

    return provider


LOOSE: dict[str, tuple[Provider, dict[str, Any], str]] = {
    "no backend": (changed(backend_id=""), {}, "no backend_id"),
    "blank backend": (changed(backend_id=" "), {}, "no backend_id"),
    "no contract": (changed(contract_id=""), {}, "no contract_id"),
    "logp in bf16": (with_logp(torch.Tensor.bfloat16), {}, "logp must be float32"),
    "logp in fp64": (with_logp(torch.Tensor.double), {}, "logp must be float32"),
    "entropy in fp64": (with_entropy(torch.Tensor.double), WITH_ENTROPY, "entropy must be float32"),
    "NaN": (with_logp(one_value(float("nan"))), {}, "not finite on 1 active rows"),
    "minus infinity": (with_logp(one_value(float("-inf"))), {}, "not finite on 1 active rows"),
    "NaN entropy": (with_entropy(one_value(float("nan"))), WITH_ENTROPY, "entropy is not finite"),
    "detached logp": (with_logp(torch.Tensor.detach), {}, "detached: no gradient reaches hidden, weight, bias"),
    "logp through hidden only": (only_through("hidden"), {}, "no gradient reaches weight, bias"),
    "logp through weight only": (only_through("weight"), {}, "no gradient reaches hidden, bias"),
    "detached entropy": (with_entropy(torch.Tensor.detach), WITH_ENTROPY, "entropy is detached"),
    "production route": (changed(provenance={"route": "P"}), {}, "went route 'P', the case declares 'R'"),
}


@pytest.mark.parametrize("name", LOOSE)
def test_strict_refuses(name: str) -> None:
    provider, changes, message = LOOSE[name]
    with pytest.raises(ValueError, match=message):
        ask(provider, "strict", request(**changes))


@pytest.mark.parametrize("name", LOOSE)
def test_auto_leaves_that_to_the_caller(name: str) -> None:
    provider, changes, _ = LOOSE[name]
    assert not is_native(ask(provider, "auto", request(**changes)))


def test_inactive_rows_may_hold_anything() -> None:
    active = torch.arange(ROWS) != 3
    assert not is_native(ask(with_logp(one_value(float("nan"))), asked=request(active=active)))


def test_entropy_without_gradient_may_be_detached() -> None:
    assert not is_native(ask(with_entropy(torch.Tensor.detach), asked=request(with_entropy=True)))


def test_a_frozen_head_needs_no_gradient() -> None:
    assert not is_native(ask(with_logp(torch.Tensor.detach), asked=request(context=context(grad=False))))


@pytest.mark.parametrize("field", ["backend_id", "contract_id"])
def test_an_identity_that_changes_is_refused(field: str) -> None:
    names = iter(["first", "second"])
    dispatch = LinearLogp(settings(lambda asked: good(asked, **{field: next(names)})))
    dispatch(request(), native)
    with pytest.raises(ValueError, match="pinned for the whole run"):
        dispatch(request(), native)


def test_another_contract_than_the_other_sides_is_refused_though_numbers_agree() -> None:
    assert not is_native(ask(good, expected_contract="plain.v1"))
    with pytest.raises(ValueError, match=r"'plain\.v1', the other side under 'plain\.v2'; equal numbers would prove"):
        ask(good, expected_contract="plain.v2")


# audit


def run_audit(provider: Provider) -> LinearLogp:
    dispatch = LinearLogp(settings(provider, "audit"))
    state = torch.random.get_rng_state()
    for _ in range(2):
        assert is_native(dispatch(request(), native))
    assert_same(torch.random.get_rng_state(), state, "random state")
    return dispatch


def test_audit_returns_native_and_records_the_difference() -> None:
    dispatch = run_audit(good)
    record = dispatch.audits[1]
    distance = (good(request()).logp.detach() + 7.0).abs().max()
    assert (record.elements, record.mismatches, record.contract_id) == (ROWS, ROWS, "plain.v1")
    assert record.max_abs_diff == pytest.approx(float(distance), rel=1e-6)


def test_audit_sees_equal_bits() -> None:
    dispatch = run_audit(lambda asked: good(asked, logp=native(asked)[0]))
    assert (dispatch.audits[0].elements, dispatch.audits[0].mismatches) == (ROWS, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_audit_of_values_that_are_no_numbers_can_be_written_down(value: float) -> None:
    def provider(asked: LinearLogpRequest) -> LinearLogpResult:
        logp = good(asked).logp.detach().clone()
        logp[1] = value
        return good(asked, logp=logp)

    record = run_audit(provider).record()
    distance = (good(request()).logp.detach() + 7.0).abs()
    distance[1] = 0.0
    json.dumps(record, allow_nan=False)
    assert record["audit"]["mismatches"] == 2 * ROWS
    assert record["audit"]["max_abs_diff"] == pytest.approx(float(distance.max()), rel=1e-6)
    assert (record["backend"], record["contract"]) == (good(request()).backend_id, "plain.v1")


def test_audit_draws_no_random_number() -> None:
    run_audit(lambda asked: good(asked, logp=torch.randn(ROWS, 1)))


@pytest.mark.parametrize("error", [ImportError("x"), ForeignRefusal("x"), RuntimeError("x")], ids=repr)
def test_audit_records_a_failure_and_lets_the_run_go_on(error: Exception) -> None:
    dispatch = run_audit(raising(error))
    assert [record.error for record in dispatch.audits] == [f"{type(error).__name__}: {error}"]


def test_audit_keeps_no_graph_of_the_provider() -> None:
    seen = []

    def provider(asked: LinearLogpRequest) -> LinearLogpResult:
        seen.append(torch.is_grad_enabled())
        return good(asked)

    run_audit(provider)
    assert seen == [False, False]


def test_audit_leaves_gradients_alone() -> None:
    asked = request()
    assert asked.context is not None

    def own(given: LinearLogpRequest) -> Any:
        return asked.context.hidden.float().sum(1, keepdim=True), None  # type: ignore[union-attr]

    LinearLogp(settings(good, "audit"))(asked, own)[0].sum().backward()
    assert asked.context.hidden.grad is not None
    assert asked.context.projection.weight.grad is None
