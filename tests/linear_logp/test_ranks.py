"""Two real ranks: one decision, one identity, one failure for all, and the same bits at every split."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from scoring import HIDDEN, PADDED, REAL, good, installed, is_native, native, request, settings

from samebits.bits import assert_same
from samebits.linear_logp import (
    LinearLogp,
    LinearLogpContext,
    LinearLogpProviderUnavailable,
    LinearLogpRequest,
    LinearLogpResult,
    LinearProjection,
    ProviderRejected,
    ProviderSettings,
    VocabPartition,
)
from samebits.linear_logp.provider import provider as own_provider
from samebits.testing.ranks import Rank, run_ranks

TOKENS = 257
Provider = Callable[[LinearLogpRequest], Any]


def one_says_unavailable(me: Rank) -> Provider:
    def provider(asked: LinearLogpRequest) -> LinearLogpResult:
        if me.rank == 1:
            raise LinearLogpProviderUnavailable("not on this card")
        return good(asked)

    return provider


def one_is_broken(me: Rank) -> Provider:
    def provider(asked: LinearLogpRequest) -> LinearLogpResult:
        if me.rank == 1:
            raise AttributeError("typo")
        return good(asked)

    return provider


def one_returns(**changes: Any) -> Callable[[Rank], Provider]:
    return lambda me: lambda asked: good(asked, **changes) if me.rank == 1 else good(asked)


def one_scores_differently(me: Rank) -> Provider:
    return lambda asked: good(asked, logp=good(asked).logp + 1e-3 * me.rank)


def run_case(me: Rank, make: Callable[[Rank], Provider], mode: str, tensor_parallel: bool = False) -> str:
    group = me.world_group  # type: ignore[attr-defined]
    asked = request(tensor_parallel_group=group if tensor_parallel else None)
    try:
        scores = LinearLogp(settings(make(me), mode), group)(asked, native)
    except (ProviderRejected, AttributeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "native" if is_native(scores) else "provider"


CASES: dict[str, tuple[Callable[[Rank], Provider], str, bool]] = {
    "sound strict": (lambda me: good, "strict", True),
    "sound auto": (lambda me: good, "auto", False),
    "one unavailable auto": (one_says_unavailable, "auto", False),
    "one unavailable strict": (one_says_unavailable, "strict", False),
    "one broken auto": (one_is_broken, "auto", False),
    "one broken strict": (one_is_broken, "strict", False),
    "one broken audit": (one_is_broken, "audit", False),
    "one malformed": (one_returns(logp=torch.zeros(3)), "auto", False),
    "one not finite": (one_returns(logp=torch.full((12, 1), float("nan"))), "strict", False),
    "one without contract": (one_returns(contract_id=""), "strict", False),
    "one endless contract": (one_returns(contract_id="plain" * 1000), "auto", False),
    "one other contract": (one_returns(contract_id="plain.v2"), "auto", False),
    "one other backend": (one_returns(backend_id="other"), "strict", False),
    "one other values": (one_scores_differently, "strict", True),
}


class _Grouped:
    """A rank with the group that it joined."""

    def __init__(self, me: Rank) -> None:
        self.rank = me.rank
        self.world_group = me.join()


def all_cases(me: Rank, out: str) -> dict[str, torch.Tensor]:
    grouped: Any = _Grouped(me)
    said = {name: run_case(grouped, *case) for name, case in CASES.items()}
    if me.rank == 0:
        installed(good, "half_installed")
    said["one not installed auto"] = load_case(grouped, "auto", "half_installed.provider")
    said["one not installed strict"] = load_case(grouped, "strict", "half_installed.provider")
    said["configured differently"] = load_case(grouped, "auto", "scoring.good" if me.rank == 0 else "scoring.native")
    Path(out, f"said{me.rank}.json").write_text(json.dumps(said))
    return {}


def load_case(me: Any, mode: Any, path: str) -> str:
    try:
        dispatch = LinearLogp(ProviderSettings(path=path, mode=mode), me.world_group)
    except ProviderRejected as error:
        return f"ProviderRejected: {error}"
    return "provider" if dispatch.configured else "native"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    home = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, "all_cases", 2, home / "run", str(home))
    return [json.loads((home / f"said{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("sound strict", "provider"),
        ("sound auto", "provider"),
        ("one unavailable auto", "native"),
        ("one broken audit", "native"),
        ("one not installed auto", "native"),
    ],
)
def test_all_ranks_decide_alike(said: list[dict[str, str]], name: str, wanted: str) -> None:
    assert [answers[name] for answers in said] == [wanted, wanted]


@pytest.mark.parametrize(
    ("name", "here", "there"),
    [
        ("one unavailable strict", "rank 1: LinearLogpProviderUnavailable: not on this card", "not on this card"),
        ("one broken auto", "failed on another rank: rank 1: AttributeError: typo", "AttributeError: typo"),
        ("one broken strict", "failed on another rank: rank 1: AttributeError: typo", "AttributeError: typo"),
        ("one malformed", "rank 1: ValueError: malformed result", "malformed result"),
        ("one not finite", "rank 1: ValueError: strict: logp is not finite", "not finite on 12 active rows"),
        ("one without contract", "rank 1: ValueError: strict: the result has no contract_id", "no contract_id"),
        ("one endless contract", "rank 1: ValueError: malformed result: contract_id has 5002", "at most 400 are told"),
        ("one other contract", "about contract: rank 0 says 'plain.v1', rank 1 says 'plain.v2'", "ranks disagree"),
        ("one other backend", "ranks disagree about backend", "ranks disagree about backend"),
        ("one other values", "ranks disagree about values", "ranks disagree about values"),
        ("one not installed strict", "is unavailable: rank 1", "is unavailable: rank 1"),
        ("configured differently", "ranks disagree about settings", "ranks disagree about settings"),
    ],
)  # fmt: skip
def test_a_failure_on_one_rank_is_raised_on_all(said: list[dict[str, str]], name: str, here: str, there: str) -> None:
    assert here in said[0][name]
    assert there in said[1][name]


def score(me: Rank, support: str) -> dict[str, torch.Tensor]:
    """The own provider over two halves of the vocabulary: rank 1's last columns are padding."""
    return scored(me.join(), me.rank, me.world, support)


def supports(form: str, start: int, stop: int) -> dict[str, torch.Tensor]:
    """Up to six kept ids a row; one row in seven keeps all, unless it is a mask, which names what it keeps."""
    kept = torch.randint(0, REAL, (TOKENS, 6), generator=torch.Generator().manual_seed(7))
    kept[::7] = -1
    if form == "ids":
        return {"kept_ids": kept}
    if form == "mask":
        mask = torch.zeros(TOKENS, PADDED, dtype=torch.bool).scatter(1, kept.clamp_min(0), True)
        return {"log_prob_keep_mask": mask[:, start:stop]}
    return {}


def scored(group: Any, rank: int, ranks: int, support: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(6)
    hidden = torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16().requires_grad_()
    whole = torch.randn(PADDED, HIDDEN, generator=draw).bfloat16()
    targets = torch.randint(0, REAL, (TOKENS,), generator=draw)
    size = PADDED // ranks
    weight = whole[rank * size : (rank + 1) * size].clone().requires_grad_()
    source = LinearLogpContext(hidden, LinearProjection(weight), VocabPartition(rank * size, size, REAL, PADDED))
    asked = LinearLogpRequest(
        None, targets, tensor_parallel_group=group, context=source, temperature=0.7, with_entropy=True,
        **supports(support, rank * size, (rank + 1) * size),
    )  # fmt: skip
    dispatch = LinearLogp(settings(own_provider), group)
    logp, entropy = dispatch(asked, native)
    logp.backward(torch.linspace(-1, 1, TOKENS)[:, None])
    assert entropy is not None
    assert hidden.grad is not None
    assert weight.grad is not None
    found = {"logp": logp.detach(), "entropy": entropy, "dhidden": hidden.grad.clone(), "dweight": weight.grad.clone()}
    silent, none = dispatch(replace(asked, active=torch.zeros(TOKENS, dtype=torch.bool)), native)
    silent.sum().backward()
    assert none is not None
    return {**found, "silent": torch.cat([silent.detach(), none[:, None]])}


@pytest.mark.parametrize("support", ["all", "ids", "mask"])
def test_two_ranks_give_the_bits_of_one(tmp_path: Path, support: str) -> None:
    parts = run_ranks(__file__, "score", 2, tmp_path / "two", support)
    alone = scored(None, 0, 1, support)
    if support != "all":
        assert not torch.equal(alone["logp"], scored(None, 0, 1, "all")["logp"])
    assert_same(alone["silent"], torch.zeros(2 * TOKENS, 1), "no active row")
    for name in ("logp", "entropy", "silent"):
        for part in parts:
            assert_same(part[name], alone[name], name)
    assert_same(torch.cat([part["dweight"] for part in parts]), alone["dweight"], "weight gradient")
    assert_same(parts[0]["dhidden"], parts[1]["dhidden"], "hidden gradient of both ranks")
    error = (parts[0]["dhidden"].float() - alone["dhidden"].float()).abs().max()
    assert float(error) <= 0.01 * float(alone["dhidden"].float().abs().max())
