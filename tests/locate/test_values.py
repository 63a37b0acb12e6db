"""Steps between floats, histograms and what is shown of two rows."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from samebits.bits import raw
from samebits.evidence.verdict import Verdict
from samebits.locate.recorded_run import as_it_was_read, noted
from samebits.locate.result import Located
from samebits.locate.values import are_bf16_values, compare_rows, tensor_of
from samebits.rl.config import RunConfig


def bits(*values: float, dtype: torch.dtype = torch.float32) -> np.ndarray:
    return raw(torch.tensor(values, dtype=dtype)).numpy()


def test_equal_rows_have_no_difference() -> None:
    assert compare_rows("x", "float32", bits(1.0, float("nan")), bits(1.0, float("nan"))) is None


def test_steps_are_counted_over_zero_and_by_size() -> None:
    tiny = float(np.finfo(np.float32).smallest_subnormal)
    found = compare_rows(
        "x", "float32", bits(1.0, -tiny, 0.0, 2.0), bits(np.nextafter(np.float32(1), 2), tiny, -0.0, 3.0)
    )
    assert found is not None
    assert (found.count, found.total) == (4, 4)
    assert found.first.ulps == 1
    assert found.first.left == "1 (0x3f800000)"
    assert (found.worst.column, found.worst.ulps) == (3, 1 << 22)
    assert found.max_abs == 1.0
    assert found.histogram == {"=1": 2, "2-3": 1, ">=65536": 1}


def test_a_value_that_is_no_number_is_the_worst() -> None:
    found = compare_rows(
        "x", "bfloat16", bits(1.0, 2.0, dtype=torch.bfloat16), bits(5.0, float("nan"), dtype=torch.bfloat16)
    )
    assert found is not None
    assert found.worst.ulps is None
    assert found.histogram["not a number"] == 1


def test_where_no_difference_is_a_number_there_is_no_largest_one() -> None:
    left, right = bits(1.0, float("inf"), float("nan")), bits(1.0, 2.0, 3.0)
    found = compare_rows("x", "float32", left, right)
    assert found is not None
    assert (found.count, found.max_abs) == (2, None)
    json.dumps(dataclasses.asdict(found), allow_nan=False)
    some = compare_rows("x", "float32", left, right + bits(0.0, 0.0, 0.0) + np.array([1, 0, 0], dtype=np.int32))
    assert some is not None
    assert some.max_abs == pytest.approx(2**-23)


def test_values_that_were_rounded_to_bfloat16_are_recognised() -> None:
    x = torch.randn(64)
    assert not are_bf16_values(raw(x).numpy())
    assert are_bf16_values(raw(x.bfloat16().float()).numpy())


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="float8"):
        tensor_of(np.zeros(1, dtype=np.int8), "float8")


def test_a_run_with_limits_says_why_its_log_probabilities_do_not_come_out_again() -> None:
    found = Located(verdict=Verdict.SAME, summary="all agree", hints=("first",))
    assert noted(found, RunConfig()) == found
    assert [hint.partition(" ")[0] for hint in noted(found, RunConfig(top_k=5)).hints] == ["first", "the"]


def test_a_run_is_located_from_another_folder_than_it_was_started_in() -> None:
    inputs = {name: {"path": f"/there/{name}"} for name in ("model", "reference", "prompts", "held_out")}
    found = as_it_was_read(RunConfig(model="m", eval_data=""), inputs)
    assert (found.model, found.prompt_data, found.eval_data) == ("/there/model", "preset:arithmetic", "")
    assert found.reference_checkpoint is None
