"""Collectives in real gloo processes: moves keep bits, trees keep the order of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from samebits.bits import assert_same, first_difference
from samebits.collectives import (
    HOST_TRANSPORTS,
    all_gather_rows,
    attach,
    copy_to_group,
    detach,
    fold_neighbours,
    gather_ragged,
    gather_rows,
    gather_states,
    scatter_rows,
    select_owner,
    tree_all_reduce,
    tree_all_reduce_bf16,
    tree_reduce_scatter,
)
from samebits.testing.ranks import Rank, run_ranks

ROWS, WIDTH = 256, 24


def partial_of(rank: int) -> Tensor:
    """fp32 values of many magnitudes, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(100 + rank)
    mantissa = torch.randn(ROWS, WIDTH, generator=generator)
    return mantissa * torch.exp2(torch.randint(-8, 9, (ROWS, WIDTH), generator=generator).float())


def odd_bits(rank: int) -> Tensor:
    """Every bf16 pattern, NaNs with payloads and negative zero included."""
    return (torch.arange(-32768, 32768, dtype=torch.int32) + rank).to(torch.int16).view(-1, 16).view(torch.bfloat16)


def rank_program(me: Rank) -> dict[str, Tensor]:
    group = me.join()
    found = {f"default {name}": tensor for name, tensor in everything(me, group).items()}
    for transport in HOST_TRANSPORTS:
        # so little room that the larger payloads travel in pieces
        attach(group, transport, timeout=60.0, capacity=8192)
        found |= {f"{transport} {name}": tensor for name, tensor in everything(me, group).items()}
        detach(group)
    return found


def everything(me: Rank, group: ProcessGroup) -> dict[str, Tensor]:
    partial = partial_of(me.rank).requires_grad_()
    reduced = tree_all_reduce(partial, group)
    (grad_reduced,) = torch.autograd.grad(reduced, partial, partial_of(9))
    scattered = tree_reduce_scatter(partial, group)
    upstream = partial_of(9)[: scattered.shape[0]] * (me.rank + 1)
    (grad_scattered,) = torch.autograd.grad(scattered, partial, upstream)
    x = odd_bits(me.rank)
    leaf = partial_of(5).to(torch.bfloat16).requires_grad_()
    entered = copy_to_group(leaf, group)
    (grad_entered,) = torch.autograd.grad(entered, leaf, partial_of(me.rank).to(torch.bfloat16))
    gathered = gather_rows(leaf, group)
    (grad_gathered,) = torch.autograd.grad(
        gathered, leaf, torch.cat([partial_of(me.rank)] * me.world).to(torch.bfloat16)
    )
    owner = torch.arange(ROWS) % me.world
    chosen = select_owner(leaf.detach() * (me.rank + 1), owner, group)
    kept = scatter_rows(leaf, group)
    (grad_kept,) = torch.autograd.grad(kept, leaf, kept.detach() * (me.rank + 1))
    ragged = gather_ragged(partial_of(me.rank)[: 3 + me.rank], [3 + r for r in range(me.world)], group)
    return {
        "reduced": reduced.detach(),
        "grad_reduced": grad_reduced,
        "scattered": scattered.detach(),
        "grad_scattered": grad_scattered,
        "bytes": all_gather_rows(x, group).view(torch.int16),
        "states": gather_states(torch.tensor([2**62 + me.rank, -me.rank]), group),
        "grad_entered": grad_entered,
        "gathered": gathered.detach(),
        "grad_gathered": grad_gathered,
        "chosen": chosen,
        "kept": kept.detach(),
        "grad_kept": grad_kept,
        "ragged": torch.cat(ragged),
        "no rows": gather_states(torch.empty(0, 5), group),
        "no columns": all_gather_rows(torch.empty(3, 0, dtype=torch.int64), group),
        "nothing summed": tree_all_reduce(torch.empty(0, 4), group),
        "nothing rounded": tree_all_reduce_bf16(torch.empty(0, 4), group, torch.ones(4).bfloat16()),
        "no share": tree_reduce_scatter(torch.empty(0, 4), group),
    }


@pytest.fixture(scope="module")
def all_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    return run_ranks(__file__, "rank_program", 4, tmp_path_factory.mktemp("four"))


@pytest.fixture(params=["default", *HOST_TRANSPORTS])
def four(request: pytest.FixtureRequest, all_four: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """What each of four ranks found over one transport."""
    carried = f"{request.param} "
    return [{n.removeprefix(carried): t for n, t in rank.items() if n.startswith(carried)} for rank in all_four]


def balanced(values: list[Tensor]) -> Tensor:
    return (values[0] + values[1]) + (values[2] + values[3])


def test_tree_sum_is_the_balanced_tree_on_every_rank(four: list[dict[str, Tensor]]) -> None:
    expected = balanced([partial_of(r) for r in range(4)])
    for rank in four:
        assert_same(rank["reduced"], expected, "tree_all_reduce")
        assert_same(rank["grad_reduced"], partial_of(9), "gradient of tree_all_reduce")


def test_this_data_tells_other_orders_apart() -> None:
    parts = [partial_of(r) for r in range(4)]
    ascending = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    other_pairs = (parts[0] + parts[2]) + (parts[1] + parts[3])
    for wrong in (ascending, other_pairs, torch.stack(parts).sum(0)):
        difference = first_difference(wrong, balanced(parts))
        assert difference is not None
        assert difference.count > ROWS


def test_reduce_scatter_is_a_cut_of_all_reduce(four: list[dict[str, Tensor]]) -> None:
    whole = torch.cat([rank["scattered"] for rank in four])
    assert_same(whole, four[0]["reduced"], "tree_reduce_scatter")
    share = ROWS // 4
    expected = torch.cat([partial_of(9)[:share] * (r + 1) for r in range(4)])
    for rank in four:
        assert_same(rank["grad_scattered"], expected, "gradient of tree_reduce_scatter")


def test_moves_keep_every_bit(four: list[dict[str, Tensor]]) -> None:
    expected = torch.cat([odd_bits(r) for r in range(4)]).view(torch.int16)
    for rank in four:
        assert_same(rank["bytes"], expected, "all_gather_rows")
        assert rank["states"].tolist() == [[2**62 + r, -r] for r in range(4)]
        assert_same(rank["ragged"], torch.cat([partial_of(r)[: 3 + r] for r in range(4)]), "gather_ragged")


def test_nothing_is_carried_too(four: list[dict[str, Tensor]]) -> None:
    shapes = {
        "no rows": (4, 0, 5), "no columns": (12, 0), "nothing summed": (0, 4), "nothing rounded": (0, 4),
        "no share": (0, 4),
    }  # fmt: skip
    for rank in four:
        assert {name: tuple(rank[name].shape) for name in shapes} == shapes


def test_owner_rows_are_copied(four: list[dict[str, Tensor]]) -> None:
    leaf = partial_of(5).to(torch.bfloat16)
    expected = torch.stack([leaf[i] * (i % 4 + 1) for i in range(ROWS)])
    for rank in four:
        assert_same(rank["chosen"], expected, "select_owner")


def test_gradients_entering_a_region_are_tree_summed(four: list[dict[str, Tensor]]) -> None:
    grads = [partial_of(r).to(torch.bfloat16).float() for r in range(4)]
    summed = balanced(grads).to(torch.bfloat16)
    share = ROWS // 4
    leaf = partial_of(5).to(torch.bfloat16)
    for index, rank in enumerate(four):
        assert_same(rank["grad_entered"], summed, "gradient of copy_to_group")
        assert_same(rank["gathered"], torch.cat([leaf] * 4), "gather_rows")
        assert_same(rank["grad_gathered"], summed, "gradient of gather_rows")
        assert_same(rank["kept"], leaf[index * share : (index + 1) * share], "scatter_rows")
        expected = torch.cat([leaf[r * share : (r + 1) * share] * (r + 1) for r in range(4)])
        assert_same(rank["grad_kept"], expected, "gradient of scatter_rows")


def test_one_rank_is_free() -> None:
    x = partial_of(0)
    for function in (tree_all_reduce, tree_reduce_scatter, copy_to_group, gather_rows, scatter_rows):
        assert function(x, None) is x
    assert select_owner(x, torch.zeros(ROWS, dtype=torch.int64), None) is x


def test_ranks_must_be_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="3 ranks is not balanced; use a power of two"):
        fold_neighbours([partial_of(r) for r in range(3)])


def test_partial_sums_must_not_be_rounded_first() -> None:
    with pytest.raises(ValueError, match=r"must be float32, got torch\.bfloat16"):
        fold_neighbours([partial_of(r).to(torch.bfloat16) for r in range(2)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_memory_of_gpus_needs_gpus() -> None:
    group: Any = object()
    with pytest.raises(ValueError, match="there is none here; use shared_memory or gloo"):
        attach(group, "peer_memory")


def uneven_program(me: Rank) -> dict[str, Tensor]:
    group = me.join()
    caught = []
    for call in (
        lambda: scatter_rows(torch.zeros(3, 2), group),
        lambda: tree_reduce_scatter(torch.zeros(3, 2), group),
        lambda: gather_ragged(torch.zeros(3, 2), [2, 2], group),
    ):
        try:
            call()
        except ValueError as error:
            caught.append(str(error))
    assert [text.split(":")[0] for text in caught] == ["own_rows", "tree_reduce_scatter", "gather_ragged"], caught
    return {"done": torch.ones(1)}


def test_uneven_rows_are_refused_before_anything_is_sent(tmp_path) -> None:
    run_ranks(__file__, "uneven_program", 2, tmp_path)
