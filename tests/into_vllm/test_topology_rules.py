"""Layouts of an engine that the contract can't serve: refused from sizes alone, with the rule and what works."""

from __future__ import annotations

from typing import Any

import pytest
from models import QWEN3

from samebits.into_vllm.topology import check_rollout_layout

EIGHT = {**QWEN3, "num_attention_heads": 8, "intermediate_size": 128}

REFUSED: list[tuple[dict[str, Any], int, int, str, str]] = [
    (EIGHT, 3, 3, "the number of workers (3) is not a power of two", "none works with max_tp 3"),
    (EIGHT, 3, 4, "the number of workers (3) is not a power of two", "the nearest that works: 2"),
    (EIGHT, 4, 2, "max_tp (2) does not divide by 4: a worker must hold whole K segments", "the nearest that works: 2"),
    ({**EIGHT, "num_attention_heads": 6}, 4, 4, "attention: query heads (6) does not divide by 4", "that works: 2"),
    ({**EIGHT, "num_attention_heads": 12, "num_key_value_heads": 3}, 2, 2, "key/value heads (3) does", "that works: 1"),
    ({**EIGHT, "num_attention_heads": 12, "num_key_value_heads": 3}, 4, 4, "few key/value heads (4) does", "works: 1"),
    ({**EIGHT, "intermediate_size": 100}, 8, 8, "ffn: intermediate size (100) does not divide by 8", "none works"),
    ({**EIGHT, "intermediate_size": 100}, 1, 8, "linear: K of the down projection (100) does not", "none works"),
    ({**EIGHT, "head_dim": 65, "num_attention_heads": 4}, 4, 8, "K of the output projection (260) does", "none works"),
]


@pytest.mark.parametrize(("config", "tp", "max_tp", "rule", "nearest"), REFUSED)
def test_what_cannot_be_served_is_refused(
    config: dict[str, Any], tp: int, max_tp: int, rule: str, nearest: str
) -> None:
    with pytest.raises(ValueError, match="rollout_tp") as refused:
        check_rollout_layout(config, tp, max_tp)
    assert rule in str(refused.value)
    assert nearest in str(refused.value)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_few_key_value_heads_are_shared(tp: int) -> None:
    check_rollout_layout(EIGHT, tp, 8)
