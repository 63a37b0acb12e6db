"""What cannot be constructed: every rule of the request's types, by the message that names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from scoring import PADDED, REAL, ROWS, context, request

from samebits.linear_logp import LinearLogpContext, LinearProjection, TokenLayout, VocabPartition

WEIGHT = torch.zeros(PADDED, 16)
PARTITION = VocabPartition(0, PADDED, REAL, PADDED)
HEAD = LinearProjection(WEIGHT)
BOOL, INTS = torch.ones(ROWS, dtype=torch.bool), torch.zeros(ROWS, dtype=torch.int64)

BROKEN: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "layout rank": (lambda: TokenLayout(2, 2, "zigzag"), ValueError, "0 <= rank < world_size"),
    "layout without ranks": (lambda: TokenLayout(0, 0), ValueError, "0 <= rank < world_size"),
    "layout name": (lambda: TokenLayout(2, 0, "striped"), ValueError, "must be one of"),  # type: ignore[arg-type]
    "single over two": (lambda: TokenLayout(2, 0, "single"), ValueError, "single means one rank"),
    "zigzag over one": (lambda: TokenLayout(1, 0, "zigzag"), ValueError, "single means one rank"),
    "layout of floats": (lambda: TokenLayout(2.0, 0, "zigzag"), TypeError, "integer"),  # type: ignore[arg-type]
    "weight is a list": (lambda: LinearProjection([[1.0]]), TypeError, "must be a tensor, got list"),  # type: ignore[arg-type]
    "weight is a vector": (lambda: LinearProjection(WEIGHT[0]), ValueError, "two axes"),
    "weight of integers": (lambda: LinearProjection(WEIGHT.long()), TypeError, "floating point"),
    "bias too short": (lambda: LinearProjection(WEIGHT, WEIGHT[:-1, 0]), ValueError, r"must be \[40\]"),
    "bias is a list": (lambda: LinearProjection(WEIGHT, [0.0]), TypeError, "must be a tensor"),  # type: ignore[arg-type]
    "bias elsewhere": (lambda: LinearProjection(WEIGHT, WEIGHT[:, 0].to("meta")), ValueError, "is on meta"),
    "partition start": (lambda: VocabPartition(-1, 4, 4, 4), ValueError, "start >= 0"),
    "partition empty": (lambda: VocabPartition(0, 0, 4, 4), ValueError, "at least one row"),
    "nothing real": (lambda: VocabPartition(0, 4, 0, 4), ValueError, "0 < real <= padded"),
    "more real than padded": (lambda: VocabPartition(0, 4, 5, 4), ValueError, "0 < real <= padded"),
    "partition outside": (lambda: VocabPartition(2, 4, 4, 4), ValueError, "does not fit"),
    "real size unknown": (lambda: VocabPartition(0, 4, None, 4), TypeError, "integer"),  # type: ignore[arg-type]
    "hidden width": (lambda: LinearLogpContext(torch.zeros(2, 15), HEAD, PARTITION), ValueError, "widths"),
    "hidden rank": (lambda: LinearLogpContext(torch.zeros(2, 1, 16), HEAD, PARTITION), ValueError, "axes"),
    "hidden elsewhere": (
        lambda: LinearLogpContext(torch.zeros(2, 16, device="meta"), HEAD, PARTITION),
        ValueError,
        "is on meta",
    ),
    "partition of other rows": (
        lambda: LinearLogpContext(torch.zeros(2, 16), LinearProjection(WEIGHT[:-1]), PARTITION),
        ValueError,
        "39 rows, the vocabulary partition says 40",
    ),
    "projection is a tensor": (
        lambda: LinearLogpContext(torch.zeros(2, 16), WEIGHT, PARTITION),  # type: ignore[arg-type]
        TypeError,
        "LinearProjection",
    ),
    "nothing to score": (lambda: request(context=None), ValueError, "logits or a context"),
    "targets of int32": (lambda: request(target_ids=INTS.int()), TypeError, "int64"),
    "targets as list": (lambda: request(target_ids=[1, 2]), TypeError, "must be a tensor, got list"),
    "targets with an axis": (lambda: request(target_ids=INTS[:, None]), ValueError, r"must be \[T\]"),
    "other rows": (lambda: request(target_ids=INTS[:-1]), ValueError, "12 rows for 11 targets"),
    "logits of other rows": (lambda: request(logits=torch.zeros(3, PADDED)), ValueError, "3 rows for 12 targets"),
    "logits of other columns": (lambda: request(logits=torch.zeros(ROWS, 3)), ValueError, "3 columns"),
    "logits as list": (lambda: request(logits=[[0.0]]), TypeError, "must be a tensor"),
    "temperature zero": (lambda: request(temperature=0.0), ValueError, "positive and finite, got 0"),
    "temperature negative": (lambda: request(temperature=-1.0), ValueError, "positive and finite"),
    "temperature infinite": (lambda: request(temperature=float("inf")), ValueError, "positive and finite"),
    "temperature nan": (lambda: request(temperature=float("nan")), ValueError, "positive and finite"),
    "temperature missing": (lambda: request(temperature=None), TypeError, "number or a tensor"),
    "temperature true": (lambda: request(temperature=True), TypeError, "number or a tensor"),
    "temperatures of one row": (lambda: request(temperature=torch.ones(1)), ValueError, r"must be \[12\]"),
    "temperatures of float64": (lambda: request(temperature=torch.ones(ROWS).double()), TypeError, "float32"),
    "one temperature zero": (lambda: request(temperature=torch.ones(ROWS).cumsum(0) - 3), ValueError, "every value"),
    "active as integers": (lambda: request(active=INTS), TypeError, "bool"),
    "active too short": (lambda: request(active=BOOL[:-1]), ValueError, r"must be \[12\]"),
    "keys as int32": (lambda: request(row_keys=INTS.int()), TypeError, "int64"),
    "one key twice": (lambda: request(row_keys=INTS), ValueError, "one key"),
    "mask of integers": (lambda: request(log_prob_keep_mask=torch.ones(ROWS, PADDED)), TypeError, "bool"),
    "mask of other columns": (lambda: request(log_prob_keep_mask=BOOL[:, None]), ValueError, r"must be \[12, 40\]"),
    "two supports": (
        lambda: request(log_prob_keep_mask=BOOL[:, None].expand(ROWS, PADDED), kept_ids=INTS[:, None]),
        ValueError,
        "one form",
    ),
    "kept ids of int32": (lambda: request(kept_ids=INTS[:, None].int()), TypeError, "kept_ids must be int64"),
    "counts without ids": (lambda: request(kept_counts=INTS), ValueError, "kept_counts without kept_ids"),
    "counts of int32": (lambda: request(kept_ids=INTS, kept_counts=INTS.int()), TypeError, "kept_counts must be int64"),
    "counts of other rows": (lambda: request(kept_ids=INTS, kept_counts=INTS[:3]), ValueError, r"must be \[12\]"),
    "counts that do not add up": (
        lambda: request(kept_ids=INTS[:5], kept_counts=torch.ones(ROWS, dtype=torch.int64)), ValueError, "add up to 12",
    ),
    "negative counts": (
        lambda: request(kept_ids=INTS[:0], kept_counts=torch.full((ROWS,), -1)), ValueError, "none may be negative",
    ),
    "kept ids of other rows": (lambda: request(kept_ids=INTS[:3, None]), ValueError, "3 rows"),
    "chunk of nothing": (lambda: request(chunk_size=0), ValueError, "rows per chunk"),
    "gradient of no entropy": (lambda: request(with_entropy_grad=True), ValueError, "ask for both"),
    "metadata as list": (lambda: request(metadata=["a"]), TypeError, "mapping"),
    "layout as string": (lambda: request(token_layout="single"), TypeError, "TokenLayout"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name: str) -> None:
    build, error, message = BROKEN[name]
    with pytest.raises(error, match=message):
        build()


def test_sound_values_pass() -> None:
    asked = request(
        temperature=torch.full((ROWS,), 0.7), active=BOOL, row_keys=INTS.add(1).cumsum(0), with_entropy=True
    )
    assert (asked.rows, asked.columns, asked.ranks) == (ROWS, PADDED, 1)


def test_requests_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        request().temperature = 2.0  # type: ignore[misc]


def test_keys_of_inactive_rows_may_repeat() -> None:
    active = torch.arange(ROWS) < 3
    keys = torch.where(active, torch.arange(ROWS), 0)
    assert request(active=active, row_keys=keys).active_rows().tolist() == [0, 1, 2]


def test_active_rows_come_in_order_of_key() -> None:
    active = torch.zeros(ROWS, dtype=torch.bool)
    active[[2, 5, 9]] = True
    assert request(active=active, row_keys=-torch.arange(ROWS)).active_rows().tolist() == [9, 5, 2]


def test_inputs_that_need_a_gradient_are_named() -> None:
    assert list(request().differentiable_inputs()) == ["hidden", "weight", "bias"]
    assert list(request(context=context(bias=False)).differentiable_inputs()) == ["hidden", "weight"]
    with torch.no_grad():
        assert request().differentiable_inputs() == {}
