"""The capture around Megatron's own output layer: what it takes, when, and what it refuses."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from samebits.bits import assert_same
from samebits.into_megatron.capture import OutputCapture, capture_outputs, flatten_rows, vocab_partition
from samebits.linear_logp import LinearLogpContext, LinearLogpRequest, LinearProjection
from samebits.linear_logp.layouts import TokenMap
from samebits.linear_logp.provider import provider
from samebits.testing.ranks import Rank, run_ranks

SEQUENCE, BATCH, HIDDEN, VOCAB, PADDED = 96, 3, 16, 37, 40
TOKENS = SEQUENCE * BATCH


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with warnings.catch_warnings():
        # Megatron and torch warn about themselves at import
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core.tensor_parallel")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def output_layer(group: Any, sequence_parallel: bool = False, **changes: Any) -> Any:
    """Megatron's own, with weights that depend on the global row alone."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear

    config = ModelParallelConfig(
        tensor_model_parallel_size=group.size(),
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
    )
    settings: dict[str, Any] = {"bias": False, "config": config, "init_method": torch.nn.init.zeros_, "tp_group": group}
    layer = ColumnParallelLinear(HIDDEN, PADDED, **{**settings, **changes})
    if layer.weight is not None:
        rows = PADDED // group.size()
        layer.weight.data = head()[group.rank() * rows : (group.rank() + 1) * rows].clone()
    return layer


def head() -> torch.Tensor:
    return torch.randn(PADDED, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()


def states(seed: int = 2, sequence: int = SEQUENCE, batch: int = BATCH) -> torch.Tensor:
    return torch.randn(sequence, batch, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


TARGETS = torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(3))


def score(context: LinearLogpContext, targets: torch.Tensor = TARGETS, group: Any = None) -> torch.Tensor:
    return provider(LinearLogpRequest(None, targets, tensor_parallel_group=group, context=context)).logp


def watched(**changes: Any) -> tuple[Any, OutputCapture]:
    layer = output_layer(dist.group.WORLD, **changes)
    return layer, OutputCapture(layer, VOCAB, PADDED)


def reference_gradient(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of all rows and the gradient of their sum to the hidden states."""
    leaf = hidden.clone().requires_grad_()
    partition = vocab_partition(PADDED, dist.group.WORLD, VOCAB)  # type: ignore[arg-type]
    logp = score(LinearLogpContext(flatten_rows(leaf), LinearProjection(head()), partition))
    (gradient,) = torch.autograd.grad(logp.sum(), [leaf])
    return logp.detach(), gradient


def test_hidden_weight_and_vocabulary_are_taken() -> None:
    layer, capture = watched()
    hidden = states().requires_grad_()
    logits, _ = layer(hidden)
    context = capture.take()
    assert context.projection.weight is layer.weight
    assert context.projection.bias is None
    partition = context.vocab_partition
    assert (partition.local_start, partition.local_size, partition.real_size, partition.padded_size) == (0, 40, 37, 40)
    # the order of rows is that of Megatron's logits, which it hands out as [B, S, V]
    assert_same(context.hidden, hidden.transpose(0, 1).reshape(TOKENS, HIDDEN))
    again = context.hidden.double() @ layer.weight.double().t()
    error = (again - logits.transpose(0, 1).reshape(TOKENS, PADDED).double()).abs().max()
    assert float(error.detach()) < 0.1


def test_gradients_reach_the_model_through_the_context() -> None:
    layer, capture = watched()
    hidden = states().requires_grad_()
    layer(hidden)
    logp = score(capture.take())
    logp.sum().backward()
    wanted, gradient = reference_gradient(states())
    assert_same(logp.detach(), wanted)
    assert hidden.grad is not None
    assert_same(hidden.grad, gradient)
    assert layer.weight.grad is not None


def test_hidden_by_keyword() -> None:
    layer, capture = watched()
    layer(input_=states())
    with torch.no_grad():
        assert capture.take().hidden.shape == (TOKENS, HIDDEN)


def test_tied_weights_come_with_the_call() -> None:
    layer, capture = watched(skip_weight_param_allocation=True)
    tied = torch.nn.Parameter(head())
    for call in (lambda: layer(states(), weight=tied), lambda: layer(states(), tied)):
        call()
        assert capture.take().projection.weight is tied


def test_the_bias_that_the_layer_adds() -> None:
    layer, capture = watched(bias=True)
    layer(states())
    assert capture.take().projection.bias is layer.bias
    layer, capture = watched(bias=True, skip_bias_add=True)
    layer(states())
    assert capture.take().projection.bias is None


def test_sizes_of_none() -> None:
    group: Any = dist.group.WORLD
    assert vocab_partition(PADDED, group, VOCAB, None).padded_size == PADDED
    with pytest.raises(ValueError, match="real vocabulary size is unknown"):
        vocab_partition(PADDED, group, None, PADDED)
    with pytest.raises(ValueError, match="padded vocabulary of 48, but 1 ranks hold 40 rows each"):
        vocab_partition(PADDED, group, VOCAB, 48)
    with pytest.raises(ValueError, match="0 < real <= padded"):
        vocab_partition(PADDED, group, PADDED + 1)


def test_a_context_is_taken_once() -> None:
    layer, capture = watched()
    with pytest.raises(RuntimeError, match="has not run"):
        capture.take()
    layer(states())
    capture.take()
    with pytest.raises(RuntimeError, match="has not run"):
        capture.take()


def test_a_context_that_nobody_took_is_forgotten() -> None:
    layer, capture = watched()
    layer(states(seed=5))
    layer(states(seed=6))
    assert_same(capture.take().hidden, flatten_rows(states(seed=6)))
    layer(states(seed=7))
    with pytest.raises(ValueError, match=r"must be \[S, B, H\]"):
        layer(states(seed=8)[None])
    with pytest.raises(RuntimeError, match="has not run"):
        capture.take()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_micro_batches_in_flight_keep_their_own_context(order: tuple[int, ...]) -> None:
    """1F1B: several forwards before the first backward, in any order of the backwards."""
    layer, capture = watched()
    inputs = [states(seed).requires_grad_() for seed in (10, 11, 12)]
    contexts = []
    for hidden in inputs:
        layer(hidden)
        contexts.append(capture.take())
    for index in order:
        score(contexts[index]).sum().backward()
    for seed, hidden in zip((10, 11, 12), inputs, strict=True):
        assert hidden.grad is not None
        assert_same(hidden.grad, reference_gradient(states(seed))[1])


def test_interleaved_chunks_have_their_own_captures() -> None:
    last = torch.nn.Module()
    last.output_layer = output_layer(dist.group.WORLD)
    first = torch.nn.Module()
    wrapped = torch.nn.Module()
    wrapped.module = last
    captures = capture_outputs([first, wrapped], VOCAB)
    assert captures[0] is None
    assert captures[1] is not None
    last.output_layer(states())
    assert captures[1].take().hidden.shape == (TOKENS, HIDDEN)
    captures[1].close()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_before_the_output(reentrant: bool) -> None:
    layer, capture = watched()
    trunk = torch.nn.Linear(HIDDEN, HIDDEN, dtype=torch.bfloat16)

    def run(recompute: bool) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = states().requires_grad_()
        out = checkpoint(trunk, hidden, use_reentrant=reentrant) if recompute else trunk(hidden)
        layer(out)
        logp = score(capture.take())
        logp.sum().backward()
        assert hidden.grad is not None
        return logp.detach(), hidden.grad

    for again, once in zip(run(True), run(False), strict=True):
        assert_same(again, once)


def test_a_recomputed_loss_keeps_its_context() -> None:
    layer, capture = watched()
    hidden = states().requires_grad_()
    layer(hidden)
    context = capture.take()

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return score(LinearLogpContext(rows, context.projection, context.vocab_partition)).sum()

    checkpoint(loss, context.hidden, use_reentrant=False).backward()
    assert hidden.grad is not None
    assert_same(hidden.grad, reference_gradient(states())[1])


def test_an_output_layer_inside_a_recomputed_region_is_refused() -> None:
    layer, capture = watched()
    checkpoint(lambda x: layer(x)[0], states().requires_grad_(), use_reentrant=True)
    with pytest.raises(RuntimeError, match="ran without gradients"):
        capture.take()


def test_a_chunked_loss_gives_the_bits_of_one() -> None:
    layer, capture = watched()
    layer.weight.main_grad = torch.zeros(PADDED, HIDDEN)
    hidden = states().requires_grad_()
    layer(hidden)
    whole = capture.take()
    score(whole).sum().backward()
    in_one, hidden.grad = layer.weight.main_grad.clone(), None
    layer.weight.main_grad.zero_()
    layer(hidden)
    context = capture.take()
    parts = []
    for start in range(0, TOKENS, 100):
        rows = slice(start, min(start + 100, TOKENS))
        part = LinearLogpContext(context.hidden[rows], context.projection, context.vocab_partition)
        parts.append(score(part, TARGETS[rows]))
        parts[-1].sum().backward(retain_graph=True)
    assert_same(torch.cat(parts).detach(), reference_gradient(states())[0])
    assert_same(layer.weight.main_grad, in_one, "weight gradient")
    assert hidden.grad is not None
    assert_same(hidden.grad, reference_gradient(states())[1], "hidden gradient")


def test_overwritten_tensors_are_noticed() -> None:
    layer, capture = watched()
    hidden = states()
    flat = hidden[:, 0]
    layer(flat)
    flat.zero_()
    with pytest.raises(RuntimeError, match="overwritten"):
        capture.take()
    layer(states())
    with torch.no_grad():
        layer.weight.zero_()
    with pytest.raises(RuntimeError, match="overwritten"):
        capture.take()


def test_other_layers_and_second_captures_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no output_size_per_partition"):
        OutputCapture(torch.nn.Linear(2, 2), VOCAB)
    layer, capture = watched()
    with pytest.raises(ValueError, match="captured already"):
        OutputCapture(layer, VOCAB)
    capture.close()
    OutputCapture(layer, VOCAB).close()


def test_after_closing_nothing_is_left() -> None:
    layer, capture = watched()
    layer(states())
    capture.close()
    assert not layer._forward_pre_hooks
    with pytest.raises(RuntimeError, match="has not run"):
        capture.take()


@pytest.mark.parametrize(("kind", "ranks"), [("single", 1), ("zigzag", 2), ("allgather", 2), ("zigzag", 4)])
def test_packed_layouts_score_every_response_token_alike(kind: Any, ranks: int) -> None:
    """Each context-parallel rank scores its own rows of the packed samples; together they give one set of bits."""
    lengths, prompts = (90, 7, 131, 64), (20, 1, 3, 63)
    by_token = {(s, p): states(100 + s, n, 1)[p, 0] for s, n in enumerate(lengths) for p in range(n)}
    draw = torch.Generator().manual_seed(9)
    ids = [torch.randint(0, VOCAB, (n,), generator=draw) for n in lengths]
    found: dict[tuple[int, int], torch.Tensor] = {}
    layout = TokenMap(kind, ranks, lengths, 8)
    layer, capture = watched()
    for rank in range(ranks):
        rows = layout.response_rows(rank, prompts)
        hidden = torch.stack([_state(by_token, layout.token_at(rank, row)) for row in range(layout.rows)])
        targets = torch.full((layout.rows,), -1)
        active = torch.zeros(layout.rows, dtype=torch.bool)
        for row, sample, place in rows:
            targets[row], active[row] = ids[sample][prompts[sample] + place], True
        with torch.no_grad():
            layer(hidden[:, None])
            logp = provider(LinearLogpRequest(None, targets, context=capture.take(), active=active)).logp
        found |= {(sample, place): logp[row, 0] for row, sample, place in rows}
    assert len(found) == sum(lengths) - sum(prompts)
    for sample, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        alone = torch.stack([by_token[sample, p] for p in range(prompt - 1, length - 1)])
        with torch.no_grad():
            layer(alone[:, None])
            wanted = score(capture.take(), ids[sample][prompt:])[:, 0]
        ours = torch.stack([found[sample, place] for place in range(length - prompt)])
        assert_same(ours, wanted, f"sample {sample}")


def _state(by_token: dict[tuple[int, int], torch.Tensor], token: tuple[int, int] | None) -> torch.Tensor:
    return torch.full((HIDDEN,), 3.0).bfloat16() if token is None else by_token[token]


def split_rows(me: Rank) -> dict[str, torch.Tensor]:
    """Sequence parallelism: this rank's rows go in; all rows are scored, and the own rows' gradient comes out."""
    from samebits.into_megatron import cpu_stand_ins
    from samebits.into_megatron.config import TrainerConfig
    from samebits.into_megatron.parallel import start_groups

    for patch in cpu_stand_ins.RESIDENT:
        patch.apply()
    start_groups(TrainerConfig(model="", tp=2, max_tp=2, rendezvous=me.rendezvous), me.rank)
    group: Any = dist.group.WORLD
    layer = output_layer(group, sequence_parallel=True)
    capture = OutputCapture(layer, VOCAB, PADDED)
    half = SEQUENCE // 2
    hidden = states()[me.rank * half : (me.rank + 1) * half].clone().requires_grad_()
    layer(hidden)
    context = capture.take()
    logp = score(context, group=group)
    logp.sum().backward()
    assert hidden.grad is not None
    start = torch.tensor([context.vocab_partition.local_start])
    return {"logp": logp.detach(), "dhidden": hidden.grad, "dweight": layer.weight.grad, "start": start}


def test_sequence_parallel_rows_are_gathered_and_gradients_counted_once(tmp_path: Path) -> None:
    parts = run_ranks(__file__, "split_rows", 2, tmp_path / "two")
    logp, gradient = reference_gradient(states())
    for rank, part in enumerate(parts):
        assert_same(part["logp"], logp)
        assert part["start"].tolist() == [rank * PADDED // 2]
    ours = torch.cat([part["dhidden"] for part in parts]).float()
    assert ours.shape == gradient.shape
    assert float((ours - gradient.float()).abs().max()) <= 0.01 * float(gradient.float().abs().max())
