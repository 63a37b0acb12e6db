"""The provider behind vime's dispatch, in both published revisions of its module."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vime_like
from vime_like import Revision, compute_linear_logp

from samebits.bits import assert_same, first_difference
from samebits.into_vime import provider
from samebits.into_vime.requests import to_request
from samebits.ops.logprob import linear_logp

ROWS, HIDDEN, REAL, PADDED = 300, 16, 37, 40
DRAW = torch.Generator().manual_seed(7)
STATES = torch.randn(ROWS, HIDDEN, generator=DRAW).bfloat16()
WEIGHT = torch.randn(PADDED, HIDDEN, generator=DRAW).bfloat16()
TARGETS = torch.randint(0, REAL, (ROWS,), generator=DRAW)
REVISIONS: list[Revision] = ["E", "L"]


def their_request(**changes: Any) -> vime_like.LinearLogpRequest:
    hidden, weight = STATES.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    context = vime_like.LinearLogpContext(
        hidden, vime_like.LinearProjection(weight), vime_like.VocabPartition(0, PADDED, REAL, PADDED)
    )
    fields: dict[str, Any] = {
        "logits": (hidden @ weight.t()).float(),
        "target_ids": TARGETS,
        "tensor_parallel_group": None,
        "token_layout": vime_like.TokenLayout(1, 0, "single"),
        "with_entropy": False,
        "with_entropy_grad": False,
        "chunk_size": -1,
        "context": context,
        "metadata": {"tp_rank": 0, "tp_world_size": 1, "real_vocab_size": REAL, "padded_vocab_size": PADDED},
    }
    return vime_like.LinearLogpRequest(**{**fields, **changes})


def ask(request: Any, revision: Revision, mode: str = "strict") -> Any:
    return compute_linear_logp(
        path="samebits.into_vime.provider", mode=mode, request=request, native=lambda: "native", revision=revision
    )


def wanted(temperature: Any = 1.0) -> torch.Tensor:
    return linear_logp(STATES, WEIGHT, TARGETS, temperature=temperature, real_vocab=REAL)[:, None]


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_the_result_passes_their_validator_with_our_bits(revision: Revision, mode: str) -> None:
    request = their_request(with_entropy=True, with_entropy_grad=True)
    logp, entropy = ask(request, revision, mode)
    assert_same(logp.detach(), wanted())
    assert entropy.shape == (ROWS,)
    logp.sum().backward()
    assert request.context is not None
    assert request.context.hidden.grad is not None
    assert request.context.projection.weight.grad is not None


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize(
    ("temperature", "ours"),
    [
        (None, 1.0),
        (0.7, 0.7),
        (1, 1.0),
        (torch.tensor([0.5]), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.full((ROWS,), 0.5), 0.5),
        (torch.full((ROWS, 1), 0.5).double(), 0.5),
    ],
    ids=["none", "float", "int", "one", "scalar", "rows", "column"],
)
def test_every_published_form_of_temperature_is_applied_once(revision: Revision, temperature: Any, ours: float) -> None:
    vime_like.check_temperature_later(temperature, ROWS)
    assert_same(ask(their_request(temperature=temperature), revision)[0].detach(), wanted(ours))
    if ours != 1.0:
        assert first_difference(wanted(ours), wanted()) is not None


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("flag", [True, False])
def test_the_flag_of_scaled_logits_is_refused(revision: Revision, flag: bool) -> None:
    request = their_request(metadata={"logits_are_temperature_scaled": flag}, temperature=0.7)
    with pytest.raises(RuntimeError, match="unavailable") as caught:
        ask(request, revision)
    assert "applied once" in str(caught.value.__cause__)
    assert ask(request, revision, "auto") == "native"


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize(
    "changes",
    [{"context": None}, {"metadata": {"top_p_sparse_token_ids": torch.zeros(ROWS, 2)}}],
    ids=["no context", "support in metadata"],
)
def test_what_is_not_served_is_unavailable_to_vime(revision: Revision, changes: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="unavailable"):
        ask(their_request(**changes), revision)
    assert ask(their_request(**changes), revision, "auto") == "native"


def test_a_dense_keep_mask_is_served() -> None:
    mask = torch.zeros(ROWS, PADDED, dtype=torch.bool)
    mask[:, :5] = True
    logp, _ = ask(their_request(log_prob_keep_mask=mask), "L")
    assert bool((logp >= wanted()).all())
    assert first_difference(logp.detach(), wanted()) is not None


def test_metadata_changes_no_value() -> None:
    lying = {"tp_rank": 3, "tp_world_size": 8, "real_vocab_size": 5, "padded_vocab_size": 5, "num_vocab_tiles": 7}
    assert_same(ask(their_request(metadata=lying), "L")[0].detach(), wanted())


def test_targets_of_another_integer_type_are_taken() -> None:
    assert_same(ask(their_request(target_ids=TARGETS.int()), "L")[0].detach(), wanted())


@pytest.mark.parametrize("chunk", [-1, 0, -5])
def test_chunking_that_is_off(chunk: int) -> None:
    assert to_request(their_request(chunk_size=chunk)).chunk_size == -1


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"target_ids": [1, 2]}, TypeError, "target_ids must be a tensor of integers, got list"),
        ({"target_ids": TARGETS.float()}, TypeError, "got torch.float32"),
        ({"target_ids": TARGETS[1:]}, ValueError, "300 rows for 299 targets"),
        ({"temperature": 0.0}, ValueError, "positive and finite"),
        ({"temperature": "warm"}, TypeError, "got str"),
        ({"temperature": True}, TypeError, "got bool"),
        ({"temperature": torch.ones(3)}, ValueError, r"must be \[300\]"),
        ({"token_layout": vime_like.TokenLayout(2, 0, "single")}, ValueError, "single means one rank"),
        ({"logits": torch.zeros(ROWS, 3)}, ValueError, "3 columns"),
        ({"log_prob_keep_mask": torch.ones(ROWS, 3, dtype=torch.bool)}, ValueError, "keep_mask"),
    ],
)
def test_a_broken_request_is_a_bug_not_an_absence(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    for mode in ("auto", "strict"):
        with pytest.raises(error, match=message):
            ask(their_request(**changes), "L", mode)


def test_ungathered_rows_of_sequence_parallelism_are_refused() -> None:
    request = their_request()
    assert request.context is not None
    half = dataclasses.replace(request.context, hidden=STATES[: ROWS // 2])
    with pytest.raises(ValueError, match="150 rows for 300 targets"):
        ask(their_request(context=half), "E", "auto")


def test_an_object_of_another_kind_is_named() -> None:
    with pytest.raises(TypeError, match="SimpleNamespace has no 'target_ids'"):
        provider(SimpleNamespace(logits=None))
