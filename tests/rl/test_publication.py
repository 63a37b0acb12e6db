"""What every engine must hold after a publication, by digests, where weights are lent and no file holds them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from samebits.bits import digest, digests
from samebits.rl.protocols import RunFailed
from samebits.rl.publication import check_publication
from samebits.timeline.types import ShardDigest

WEIGHTS = {"a": torch.arange(12, dtype=torch.float32).view(4, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
WHOLE = [ShardDigest(name, 0, 0, len(tensor), digest(tensor)) for name, tensor in WEIGHTS.items()]


@pytest.fixture
def lent(tmp_path: Path) -> Path:
    """What `collectives.lending.lend` writes, as far as the loop reads it: it opens no tensor."""
    listed = {name: {"shape": list(tensor.shape)} for name, tensor in WEIGHTS.items()}
    (tmp_path / "handles.json").write_text(json.dumps(listed))
    return tmp_path


def test_engines_hold_what_is_lent(lent: Path) -> None:
    check_publication(lent, digests(WEIGHTS), [WHOLE, WHOLE])


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([replace(WHOLE[0], digest="0" * 64), WHOLE[1]], "engine 0: 'a' .* differs from the published weights"),
        (WHOLE[:1], "'b' is not fully accounted for"),
        ([*WHOLE, replace(WHOLE[1], name="c")], "was not published: 'c'"),
        ([replace(WHOLE[0], stop=2), replace(WHOLE[0], start=2), WHOLE[1]], "holds a part of 'a'"),
    ],
)
def test_other_bits_gaps_strangers_and_parts_are_named(lent: Path, shards: list[ShardDigest], message: str) -> None:
    with pytest.raises(RunFailed, match=message):
        check_publication(lent, digests(WEIGHTS), [shards])


def test_the_trainer_must_name_the_same_parameters(lent: Path) -> None:
    with pytest.raises(RunFailed, match="name different parameters"):
        check_publication(lent, digests({"a": WEIGHTS["a"]}), [WHOLE])
