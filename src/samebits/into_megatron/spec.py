"""Megatron's layer spec for a case: our modules for R groups, Megatron's own local modules for P groups."""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from samebits.contract.routes import ModuleRoutes, Route
from samebits.into_megatron.model import ModelShape
from samebits.into_megatron.modules import (
    StrictColumnParallelLinear,
    StrictCoreAttention,
    StrictGateUpLinear,
    StrictHeadNorm,
    StrictLayer,
    StrictNorm,
    StrictRowParallelLinear,
    StrictSelfAttention,
    StrictSwiGLU,
)


def block_spec(shape: ModelShape, case: ModuleRoutes, max_tp: int, layers: int) -> TransformerBlockSubmodules:
    """The spec of `layers` decoder layers. `max_tp` is the number of K segments of row-parallel layers on route R."""
    layer = ModuleSpec(
        module=StrictLayer if case.all_strict else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=_norm(case.attention),
            self_attention=_attention(shape, case.attention, max_tp),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=_norm(case.ffn),
            mlp=_mlp(case.ffn, max_tp),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=_norm(case.logp))


def _norm(route: Route) -> type:
    return StrictNorm if route == "R" else LocalSpecProvider().layer_norm(rms_norm=True)


def _attention(shape: ModelShape, route: Route, max_tp: int) -> ModuleSpec:
    if route == "P":
        norm: Any = _norm(route) if shape.qk_norm else None
        native = LocalSpecProvider()
        return ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=native.column_parallel_linear(),
                core_attention=native.core_attention(),
                linear_proj=native.row_parallel_linear(),
                q_layernorm=norm or IdentityOp,
                k_layernorm=norm or IdentityOp,
            ),
        )
    return ModuleSpec(
        module=StrictSelfAttention,
        params={
            "attn_mask_type": AttnMaskType.causal,
            "rope_base": shape.rope_base,
            "max_positions": shape.max_positions,
        },
        submodules=SelfAttentionSubmodules(
            linear_qkv=StrictColumnParallelLinear,
            core_attention=StrictCoreAttention,
            linear_proj=ModuleSpec(module=StrictRowParallelLinear, params={"segments": max_tp}),
            q_layernorm=StrictHeadNorm if shape.qk_norm else None,
            k_layernorm=StrictHeadNorm if shape.qk_norm else None,
        ),
    )


def _mlp(route: Route, max_tp: int) -> ModuleSpec:
    if route == "P":
        native = LocalSpecProvider()
        submodules = MLPSubmodules(linear_fc1=native.column_parallel_linear(), linear_fc2=native.row_parallel_linear())
    else:
        submodules = MLPSubmodules(
            linear_fc1=StrictGateUpLinear,
            linear_fc2=ModuleSpec(module=StrictRowParallelLinear, params={"segments": max_tp}),
            activation_func=StrictSwiGLU,
        )
    return ModuleSpec(module=MLP, submodules=submodules)
