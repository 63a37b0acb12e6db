"""From a trainer's settings to Megatron's objects: configuration, model chunks, data-parallel wrapper, optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from samebits.into_megatron import cpu_stand_ins
from samebits.into_megatron.config import TrainerConfig
from samebits.into_megatron.device import rank_device
from samebits.into_megatron.gpt import ScoringModel
from samebits.into_megatron.gradients import OrderedDataParallel
from samebits.into_megatron.host_moments import HostMomentsAdamW
from samebits.into_megatron.model import ModelShape, read_shape
from samebits.into_megatron.order import GradientOrder
from samebits.into_megatron.plan import plan
from samebits.into_megatron.spec import block_spec
from samebits.into_megatron.weights import load_parameters
from samebits.linear_logp import LinearLogp, ProviderSettings, TokenLayout


def served_shape(path: str, config: TrainerConfig) -> ModelShape:
    """The shape of a model directory; ValueError where the model, or this layout of it, is not served."""
    shape = read_shape(path)
    plan(config.layout, shape, config.max_tp, config.strict_gradients)
    return replace(shape, vocab_multiple=config.vocab_multiple * config.max_tp)


def build_chunks(path: str, shape: ModelShape, config: TrainerConfig, scorer: LinearLogp) -> list[ScoringModel]:
    """This pipeline rank's chunks of the model, in order of their virtual stages, with the weights of `path`."""
    stages = [None] if config.vpp == 1 else range(config.vpp)
    tensors = load_parameters(path, shape, config.tp, parallel_state.get_tensor_model_parallel_rank())
    with cpu_stand_ins.in_place(cpu_stand_ins.MODEL_SETUP, config.device):
        chunks = [_build_chunk(shape, config, scorer, stage) for stage in stages]
    for chunk in chunks:
        chunk.load(tensors)
    return chunks


def _build_chunk(shape: ModelShape, config: TrainerConfig, scorer: LinearLogp, stage: int | None) -> ScoringModel:
    megatron = transformer_config(shape, config)
    spec = block_spec(shape, config.case, config.max_tp, shape.layers // (config.pp * config.vpp))
    kind: Any = config.cp_layout if config.cp > 1 else "single"
    chunk = ScoringModel(
        shape,
        config.case,
        config.temperature,
        scorer,
        layout=TokenLayout(config.cp, parallel_state.get_context_parallel_rank(), kind),
        config=megatron,
        spec=spec,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        vp_stage=stage,
    )
    return chunk.bfloat16().to(rank_device(config, dist.get_rank()))


@dataclass
class OrderedConfig(TransformerConfig):
    """Megatron's configuration, and how gradients are summed where that must not depend on the layout."""

    gradient_order: GradientOrder | None = None


def transformer_config(shape: ModelShape, config: TrainerConfig) -> OrderedConfig:
    """Megatron's TransformerConfig for `shape`: bf16 parameters, no dropout, no fusion, gradients summed per token."""

    def leave(weight: torch.Tensor) -> torch.Tensor:
        # Every parameter is loaded afterwards; Megatron still runs its initialiser to set sharding attributes.
        return weight.zero_()

    interleaved = config.vpp > 1
    return OrderedConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.eps,
        normalization="RMSNorm",
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        use_te_activation_func=config.case.ffn == "R",
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        init_method=leave,
        output_layer_init_method=leave,
        embedding_init_method=leave,
        use_cpu_initialization=True,
        tensor_model_parallel_size=config.tp,
        context_parallel_size=config.cp,
        sequence_parallel=config.sequence_parallel,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.vpp if interleaved else None,
        # Micro-batches are packed, so each has a length of its own, which the stages tell each other.
        variable_seq_lengths=config.pp > 1,
        moe_token_dispatcher_type="alltoall",  # there are no experts, but the default excludes lengths that vary
        # With two ranks, both neighbours of an interleaved stage are one process: one batch of sends would mix them up.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        batch_p2p_sync=False,
        recompute_granularity="full" if config.recompute else None,
        recompute_method="uniform" if config.recompute else None,
        recompute_num_layers=1 if config.recompute else None,
        # Gradients of data- and context-parallel ranks are summed, not averaged: the loss divides by all tokens.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        gradient_order=_gradient_order(config) if config.strict_gradients else None,
    )


def _gradient_order(config: TrainerConfig) -> GradientOrder:
    tensor, context = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()
    return GradientOrder(config.max_tp, tensor, context)


def build_scorer(config: TrainerConfig) -> LinearLogp:
    """The provider boundary. Only ranks of the last pipeline stage score, and all of those score equally often."""
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return LinearLogp(_provider_settings(config), group if config.pp > 1 else dist.group.WORLD)


def _provider_settings(config: TrainerConfig) -> ProviderSettings:
    """Which provider scores: on route P none, unless it is audited there."""
    mode, route = config.linear_logp_provider_mode, config.case.logp
    used = route == "R" or mode == "audit"
    return ProviderSettings(
        path=(config.linear_logp_provider or None) if used else None,
        mode=mode,
        route=route,
        expected_contract=config.linear_logp_contract,
    )


def wrap(chunk: ScoringModel, config: TrainerConfig, first: bool) -> OrderedDataParallel:
    """Megatron's data-parallel wrapper around a chunk; `first` is this pipeline rank's first chunk."""
    each = config.gradient_segments // config.dp
    start = parallel_state.get_data_parallel_rank() * each
    order, table = chunk.config.gradient_order, None
    if order is not None and chunk.shape.tied and chunk.pre_process and chunk.post_process:
        table = torch.zeros_like(chunk.embedding.word_embeddings.weight, dtype=torch.float32)
        order.table = table
    return OrderedDataParallel(chunk, first, range(start, start + each), table)


def build_optimizer(config: TrainerConfig, chunks: list[torch.nn.Module]) -> Any:
    """Megatron's mixed-precision Adam over all chunks; clipping is left to the caller."""
    with cpu_stand_ins.in_place(cpu_stand_ins.OPTIMIZER_SETUP, config.device):
        chained = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                adam_beta1=config.adam_betas[0],
                adam_beta2=config.adam_betas[1],
                adam_eps=config.adam_eps,
                weight_decay=config.weight_decay,
                bf16=True,
                params_dtype=torch.bfloat16,
                clip_grad=0.0,
            ),
            chunks,
            use_gloo_process_groups=False,
        )
    (optimizer,) = chained.chained_optimizers
    if config.optimizer_offload:
        optimizer.optimizer = _with_host_moments(optimizer.optimizer, config.optimizer_offload)
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
        if config.device == "cuda" and isinstance(optimizer.optimizer, torch.optim.AdamW):
            # In place, element by element; torch's default on a GPU would need copies of both moments.
            group["fused"], group["foreach"] = True, False
    return optimizer


def _with_host_moments(optimizer: torch.optim.Optimizer, fraction: float) -> HostMomentsAdamW:
    """The same AdamW, before its first step, with moments in host memory. ValueError for another optimizer.

    Megatron's own way, HybridDeviceOptimizer, needs its distributed optimizer, which sums gradients by its own rules,
    and updates on the CPU, whose kernel rounds in another way.
    """
    if not isinstance(optimizer, torch.optim.AdamW):
        raise ValueError(
            f"optimizer_offload serves torch's AdamW, but Megatron-Core uses {type(optimizer).__module__} here; "
            "set optimizer_offload to 0, or remove TransformerEngine and apex"
        )
    return HostMomentsAdamW(optimizer.param_groups, fraction)
