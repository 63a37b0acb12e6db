"""The capture under Megatron's own schedules: micro-batches in flight, recomputed layers, a loss in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits.bits import assert_same
from samebits.testing.ranks import Rank, run_ranks
from samebits.testing.tiny_models import write_tiny_model

LENGTHS = (70, 33, 90, 41, 57, 64)
# rank count -> the layouts that its ranks run, one after the other
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"none": {}},
    2: {"1f1b": {"pp": 2, "recompute": True}, "interleaved": {"pp": 2, "vpp": 2, "recompute": True}},
}


def preload() -> None:
    import megatron.core.models.gpt  # noqa: F401  each rank would take seconds over it


def model_chunks(config: Any) -> list[Any]:
    """Megatron's GPTModel as it is, with the contract's layers; its forward gives logits."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    from samebits.into_megatron import cpu_stand_ins
    from samebits.into_megatron.building import served_shape, transformer_config
    from samebits.into_megatron.spec import block_spec
    from samebits.into_megatron.weights import load_parameters

    shape = served_shape(config.model, config)
    tensors, chunks = load_parameters(config.model, shape, 1, 0), []
    for stage in [None] if config.vpp == 1 else range(config.vpp):
        with cpu_stand_ins.in_place(cpu_stand_ins.MODEL_SETUP):
            chunk = GPTModel(
                config=transformer_config(shape, config),
                transformer_layer_spec=block_spec(shape, config.case, 1, shape.layers // (config.pp * config.vpp)),
                vocab_size=shape.vocab,
                max_sequence_length=shape.max_positions,
                position_embedding_type="none",
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                vp_stage=stage,
            ).bfloat16()
        for name, parameter in chunk.named_parameters():
            parameter.data.copy_(tensors[whole_name(chunk, name)])
            parameter.main_grad = torch.zeros(parameter.shape)
        chunks.append(chunk)
    return chunks


def whole_name(chunk: Any, name: str) -> str:
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return name
    number, _, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{chunk.decoder.layers[int(number)].layer_number - 1}.{rest}"


def batches() -> Iterator[tuple[Tensor, Any]]:
    from samebits.into_megatron.layout import Packing

    draw = torch.Generator().manual_seed(4)
    for length in LENGTHS:
        bounds = torch.tensor([0, 20, length], dtype=torch.int32)
        positions = torch.cat([torch.arange(20), torch.arange(length - 20)]).int()
        yield torch.randint(0, 101, (1, length), generator=draw), Packing(positions, bounds, bounds, None)


def score(context: Any, targets: Tensor, rows: int) -> Tensor:
    """The provider on `rows` rows at a time: [T].

    The last rows come first: autograd begins with what was made last, so that sums over tokens ascend.
    """
    from samebits.linear_logp import LinearLogpContext, LinearLogpRequest
    from samebits.linear_logp.provider import provider

    parts = []
    for start in reversed(range(0, len(targets), rows)):
        part = slice(start, start + rows)
        hidden = LinearLogpContext(context.hidden[part], context.projection, context.vocab_partition)
        parts.append(provider(LinearLogpRequest(None, targets[part], context=hidden)).logp[:, 0])
    return torch.cat(parts[::-1])


class Watch:
    """Takes a context after each forward of the last chunk; counts how many wait for their backward."""

    def __init__(self, chunks: list[Any], rows: int, take: Callable[[Any], Any]) -> None:
        from samebits.into_megatron.capture import capture_outputs

        self.captures = dict(zip(chunks, capture_outputs(chunks, 101), strict=True))
        self.rows, self.take = rows, take
        self.logp: list[Tensor] = []
        self.waiting = self.most = 0

    def step(self, iterator: Iterator[tuple[Tensor, Any]], chunk: Any) -> tuple[Tensor, Any]:
        ids, packing = next(iterator)
        output = chunk(ids, None, None, packed_seq_params=packing)
        capture = self.captures[chunk]
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        output.register_hook(self._backward)
        if capture is None:
            return output, None
        context, targets = self.take(capture), ids[0].roll(-1)

        def loss(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            logp = score(context, targets, self.rows)
            self.logp.append(logp.detach())
            # The logits take no part in the loss, only in the graph that the schedule sees.
            return -logp.sum() + 0.0 * logits.sum(), torch.tensor(0, dtype=torch.int), {}

        return output, loss

    def _backward(self, gradient: Tensor) -> None:
        self.waiting -= 1


def run_layouts(me: Rank, model: str, rows: str, fault: str) -> dict[str, Tensor]:
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from samebits.into_megatron import cpu_stand_ins
    from samebits.into_megatron.config import TrainerConfig
    from samebits.into_megatron.parallel import start_groups, stop_groups

    for patch in cpu_stand_ins.RESIDENT:
        patch.apply()
    found = {}
    for name, layout in LAYOUTS[me.world].items():
        config = TrainerConfig(model=model, rendezvous=f"{me.rendezvous}-{name}" if me.world > 1 else "", **layout)
        start_groups(config, me.rank)
        chunks = model_chunks(config)
        watch = Watch(chunks, int(rows), faulty(fault))
        get_forward_backward_func()(
            forward_step_func=watch.step,
            data_iterator=[batches() for _ in chunks],
            model=chunks,
            num_microbatches=len(LENGTHS),
            seq_length=1,
            micro_batch_size=1,
        )
        found[f"{name}/most"] = torch.tensor([watch.most])
        found |= {f"{name}/logp": torch.cat(watch.logp)} if watch.logp else {}
        for chunk in chunks:
            for key, p in chunk.named_parameters():
                found[f"{name}/grad/{whole_name(chunk, key)}"] = p.main_grad + (0 if p.grad is None else p.grad)
        stop_groups()
    return found


def faulty(fault: str) -> Callable[[Any], Any]:
    """How the context of a forward pass is taken; "stale" hands out the one before."""
    kept: list[Any] = []

    def take(capture: Any) -> Any:
        kept.append(capture.take())
        return kept[-1] if fault == "none" or len(kept) == 1 else kept[-2]

    return take


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4))


@pytest.fixture(scope="module")
def plain(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """One rank, no recomputation, the loss in one piece."""
    return run_ranks(__file__, "run_layouts", 1, tmp_path_factory.mktemp("one"), model, "1000", "none")[0]


@pytest.fixture(scope="module")
def staged(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """Two stages, layers recomputed, the loss in chunks of 16 rows."""
    return run_ranks(__file__, "run_layouts", 2, tmp_path_factory.mktemp("two"), model, "16", "none")


@pytest.mark.parametrize("schedule", LAYOUTS[2])
def test_schedules_keep_each_micro_batch_with_its_context(
    plain: dict[str, Tensor], staged: list[dict[str, Tensor]], schedule: str
) -> None:
    logp = next(rank[f"{schedule}/logp"] for rank in staged if f"{schedule}/logp" in rank)
    assert len(logp) == sum(LENGTHS) >= 256
    assert_same(logp, plain["none/logp"], schedule)
    assert max(int(rank[f"{schedule}/most"]) for rank in staged) >= 2, "no two micro-batches were in flight"
    merged = {key: tensor for rank in staged for key, tensor in rank.items() if f"{schedule}/grad/" in key}
    assert len(merged) == sum("/grad/" in key for key in plain)
    for key, gradient in merged.items():
        assert gradient.abs().sum() > 0, key
        assert_same(gradient, plain[key.replace(schedule, "none")], key)


def test_a_context_of_another_micro_batch_is_noticed(plain: dict[str, Tensor], model: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"target_ids|rows"):
        run_ranks(__file__, "run_layouts", 1, tmp_path, model, "1000", "stale")
