"""An engine and a trainer in which a test can plant a fault, and take it back. Imported by name in their processes.

A fault changes objects of the running process; there is no setting that could bring one about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samebits.into_megatron.config import TrainerConfig
from samebits.into_megatron.trainer import TrainerRank
from samebits.into_vllm.config import EngineConfig
from samebits.into_vllm.engine import RolloutEngine

Undo = Callable[[], None]


class FaultyEngine(RolloutEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._undo: list[Undo] = []

    def plant(self, name: str) -> None:
        """One of ROLLOUT_FAULTS."""
        undo = self._engine.collective_rpc(_in_worker, args=(name,))
        self._undo += undo

    def heal(self) -> None:
        """Every fault is gone."""
        while self._undo:
            self._undo.pop()()


class FaultyTrainer(TrainerRank):
    def __init__(self, config: TrainerConfig, rank: int) -> None:
        super().__init__(config, rank)
        self._undo: list[Undo] = []

    def plant(self, name: str) -> None:
        """One of TRAINER_FAULTS."""
        with torch.no_grad():
            self._undo.append(TRAINER_FAULTS[name](self.policy[0].module))

    def heal(self) -> None:
        """Every fault is gone."""
        while self._undo:
            self._undo.pop()()


def _in_worker(worker: Any, name: str) -> Undo:
    model = worker.model_runner.model
    with torch.no_grad():
        return ROLLOUT_FAULTS[name](model)


def put(owner: Any, name: str, value: Any) -> Undo:
    """Set an attribute; what comes back restores it."""
    had, old = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)

    def undo() -> None:
        if had:
            setattr(owner, name, old)
        else:
            delattr(owner, name)

    return undo


def nudge(tensor: Tensor, element: int) -> Undo:
    """One element moves to the next bf16 value."""
    bits = tensor.data.view(torch.int16).view(-1)
    old = bits[element].clone()
    bits[element] += 1

    def undo() -> None:
        bits[element] = old

    return undo


class Altered:
    """Kernels of which some are others."""

    def __init__(self, kernels: Any, **others: Callable[..., Any]) -> None:
        self._kernels = kernels
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


def _alter(model: Any, **others: Callable[..., Any]) -> Undo:
    decoder = model.samebits.decoder
    return put(decoder, "kernels", Altered(decoder.kernels, **others))


def epsilon_of_one_norm(model: Any) -> Undo:
    decoder = model.samebits.decoder
    norm, wrong = decoder.kernels.rms_norm_forward, decoder.layers[1].mlp_norm

    def forward(*args: Any) -> None:
        norm(*args[:5], 1e-3 if args[4] == wrong else args[5], *args[6:])

    return _alter(model, rms_norm_forward=forward)


def swapped_pages(model: Any) -> Undo:
    from vllm.forward_context import get_forward_context

    decoder = model.samebits.decoder
    write = decoder.kernels.write_kv
    attention = decoder.attention[1]
    calls = [0]

    def swap(*args: Any) -> None:
        write(*args)
        paged = get_forward_context().attn_metadata[attention.layer_name]
        if args[6] == attention.kv_cache.data_ptr() and int(paged.query_start_loc[1]) > 16:
            first, second = paged.block_table[0, :2].tolist()
            attention.kv_cache[[first, second]] = attention.kv_cache[[second, first]]
            calls[0] += 1

    return _alter(model, write_kv=swap)


def rotary_base(model: Any) -> Undo:
    from samebits.ops.rotary import rotary_table

    rotary = model.model.layers[0].self_attn.rotary_emb
    cos, sin = rotary_table(rotary.head_size, 500000.0, rotary.cos.shape[0])
    undo = [put(rotary, "cos", cos), put(rotary, "sin", sin)]
    return lambda: [one() for one in undo] and None


def stale_weight(model: Any) -> Undo:
    return nudge(model.model.layers[1].mlp.down_proj.weight, 77)


def stale_norm_weight(model: Any) -> Undo:
    return nudge(model.model.layers[1].input_layernorm.weight, 7)


def bf16_logits(model: Any) -> Undo:
    handle = model.logits_processor.register_forward_hook(lambda module, args, logits: logits.bfloat16().float())
    return handle.remove


def later_positions(model: Any) -> Undo:
    def shift(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "positions": kwargs["positions"] + (kwargs["positions"] >= 12)}

    return model.register_forward_pre_hook(shift, with_kwargs=True).remove


def other_token(model: Any) -> Undo:
    def replace(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        ids = torch.where(kwargs["positions"] == 9, (kwargs["input_ids"] + 1) % 100, kwargs["input_ids"])
        return args, {**kwargs, "input_ids": ids}

    return model.register_forward_pre_hook(replace, with_kwargs=True).remove


def head_in_two_segments(model: Any) -> Undo:
    """Another order of K in the LM head."""
    from samebits.ops.linear import linear_partial

    def forward(head: Any, hidden: Tensor, bias: Any = None, skip_gather: bool = False) -> Tensor:
        return linear_partial(hidden, head.weight[: model.config.vocab_size], segments=2)

    return put(model.logits_processor, "forward", forward)


ROLLOUT_FAULTS: dict[str, Callable[[Any], Undo]] = {
    fault.__name__: fault
    for fault in (
        epsilon_of_one_norm,
        swapped_pages,
        rotary_base,
        stale_weight,
        stale_norm_weight,
        bf16_logits,
        later_positions,
        other_token,
        head_in_two_segments,
    )
}


def native_swiglu(model: Any) -> Undo:
    def forward(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    return put(model.decoder.layers[0].mlp.activation_func, "forward", forward)


def temperature(model: Any) -> Undo:
    return put(model, "temperature", 0.9)


def no_query_norm(model: Any) -> Undo:
    return put(model.decoder.layers[1].self_attention.q_layernorm, "forward", lambda x: x)


def one_k_segment(model: Any) -> Undo:
    return put(model.decoder.layers[0].self_attention.linear_proj, "segments", 1)


def one_k_segment_behind_its_back(model: Any) -> Undo:
    """The layer still says that it computes two."""
    from samebits.ops.linear import linear

    layer = model.decoder.layers[1].mlp.linear_fc2
    return put(layer, "forward", lambda x: (linear(x, layer.weight, segments=1), None))


def blind_to_itself(model: Any) -> Undo:
    """A query does not see its own key: a causal mask off by one."""
    from samebits.ops.attention import attention

    core = model.decoder.layers[1].self_attention.core_attention

    def forward(query: Tensor, key: Tensor, value: Tensor, packing: Any) -> Tensor:
        positions = (packing.positions - 1).clamp(min=0)
        return attention(query, key, value, packing.keys, core.scale, positions, packing.keys)

    return put(core, "forward", forward)


def attention_scale(model: Any) -> Undo:
    core = model.decoder.layers[1].self_attention.core_attention
    return put(core, "scale", core.scale * 1.01)


def no_bias(model: Any) -> Undo:
    return put(model.decoder.layers[1].self_attention.linear_qkv, "skip_bias_add", True)


def swapped_gate_and_up(model: Any) -> Undo:
    def swap(module: Any, args: Any, out: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return torch.cat(out[0].chunk(2, dim=-1)[::-1], dim=-1), out[1]

    return model.decoder.layers[0].mlp.linear_fc1.register_forward_hook(swap).remove


def residual_one_step_off(model: Any) -> Undo:
    def off(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        x = args[0].clone()
        nudge(x.view(-1, x.shape[-1])[21], 5)
        return (x,)

    return model.decoder.layers[0].pre_mlp_layernorm.register_forward_pre_hook(off).remove


def embedding_of_a_neighbour(model: Any) -> Undo:
    embed = type(model)._embed
    return put(model, "_embed", lambda ids: embed(model, torch.where(ids == 33, 34, ids)))


def score_one_step_off(model: Any) -> Undo:
    def off(module: Any, args: Any, logp: Tensor) -> Tensor:
        return (logp.view(torch.int32) + 1).view(torch.float32)

    return model.register_forward_hook(off).remove


TRAINER_FAULTS: dict[str, Callable[[Any], Undo]] = {
    fault.__name__: fault
    for fault in (
        native_swiglu,
        temperature,
        no_query_norm,
        one_k_segment,
        one_k_segment_behind_its_back,
        blind_to_itself,
        attention_scale,
        no_bias,
        swapped_gate_and_up,
        residual_one_step_off,
        embedding_of_a_neighbour,
        score_one_step_off,
    )
}
