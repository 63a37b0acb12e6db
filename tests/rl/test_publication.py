"""What every engine must hold after a publication, by digests, where weights are lent and no file holds them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from samebits.bits import part_digests, tree_digest, tree_digests
from samebits.rl.protocols import RunFailed
from samebits.rl.publication import check_publication
from samebits.timeline.types import Part, ShardDigest

WEIGHTS = {"a": torch.arange(12, dtype=torch.float32).view(4, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
WHOLE = [ShardDigest(name, 0, 0, len(tensor), tree_digest(tensor)) for name, tensor in WEIGHTS.items()]


@pytest.fixture
def lent(tmp_path: Path) -> Path:
    """What `collectives.lending.lend` writes, as far as the loop reads it: it opens no tensor."""
    listed = {name: {"shape": list(tensor.shape)} for name, tensor in WEIGHTS.items()}
    (tmp_path / "handles.json").write_text(json.dumps(listed))
    return tmp_path


def parts_of_weights(parts: Sequence[Part]) -> list[str]:
    """What the trainer answers that lends WEIGHTS."""
    return part_digests(WEIGHTS, parts)


def halves(name: str, dim: int) -> list[ShardDigest]:
    """What two workers hold that share this parameter along `dim`."""
    size = WEIGHTS[name].shape[dim]
    parts = [Part(name, dim, 0, size // 2), Part(name, dim, size // 2, size)]
    return [ShardDigest(*part, found) for part, found in zip(parts, parts_of_weights(parts), strict=True)]


def not_asked(parts: Sequence[Part]) -> list[str]:
    raise AssertionError(f"whole parameters have digests already: {parts}")


def test_engines_hold_what_is_lent(lent: Path) -> None:
    check_publication(lent, tree_digests(WEIGHTS), [WHOLE, WHOLE], not_asked)


@pytest.mark.parametrize("dim", [0, 1])
def test_workers_hold_parts_of_what_is_lent(lent: Path, dim: int) -> None:
    held = [*halves("a", dim), WHOLE[1]]
    check_publication(lent, tree_digests(WEIGHTS), [held, WHOLE], parts_of_weights)
    wrong = [held[0], replace(held[1], digest="0" * 64), held[2]]
    with pytest.raises(RunFailed, match=r"engine 1: 'a' .* differs from the published weights"):
        check_publication(lent, tree_digests(WEIGHTS), [held, wrong], parts_of_weights)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([replace(WHOLE[0], digest="0" * 64), WHOLE[1]], "engine 0: 'a' .* differs from the published weights"),
        (WHOLE[:1], "'b' is not fully accounted for"),
        ([*WHOLE, replace(WHOLE[1], name="c")], "was not published: 'c'"),
        ([replace(WHOLE[0], stop=9), WHOLE[1]], "rows 0:9 of 'a' do not exist"),
        ([halves("a", 0)[0], WHOLE[1]], "'a' is not fully accounted for"),
    ],
)
def test_other_bits_gaps_and_strangers_are_named(lent: Path, shards: list[ShardDigest], message: str) -> None:
    with pytest.raises(RunFailed, match=message):
        check_publication(lent, tree_digests(WEIGHTS), [shards], parts_of_weights)


def test_the_trainer_must_name_the_same_parameters(lent: Path) -> None:
    with pytest.raises(RunFailed, match="name different parameters"):
        check_publication(lent, tree_digests({"a": WEIGHTS["a"]}), [WHOLE], not_asked)
