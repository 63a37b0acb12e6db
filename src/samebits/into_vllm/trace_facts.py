"""Of every site that a worker computes: the code behind it, its route, and the constants that it computes with."""

from __future__ import annotations

from typing import Any

from samebits.into_vllm.loader import WorkerState
from samebits.into_vllm.proof import class_name
from samebits.ops.rotary import table_base

_SITES = {
    "input_layernorm": "input norm",
    "self_attn.qkv_proj": "qkv projection",
    "self_attn.q_norm": "q norm",
    "self_attn.k_norm": "k norm",
    "self_attn.rotary_emb": "rotary",
    "self_attn.attn": "attention",
    "self_attn.o_proj": "output projection",
    "post_attention_layernorm": "MLP norm",
    "mlp.gate_up_proj": "gate/up projection",
    "mlp.act_fn": "SwiGLU",
    "mlp.down_proj": "down projection",
}
_ENDS = {"model.embed_tokens": "embedding", "model.norm": "final norm", "logits_processor": "LM head"}


def describe(state: WorkerState, sampler: Any) -> dict[str, Any]:
    """{"layer name of the site": {"route", "implementation", "parameters"}}; layer -1 for sites outside of layers."""
    found: dict[str, Any] = {}
    layers = 1 + max(
        (int(m.name.split(".")[2]) for m in state.modules if m.name.startswith("model.layers.")), default=0
    )
    for one in state.modules:
        parts = one.name.split(".")
        facts = {
            "route": one.route,
            "implementation": one.implementation,
            "parameters": _parameters(one.module, one.place.boundary),
        }
        if one.name in _ENDS:
            found[f"-1 {_ENDS[one.name]}"] = facts
            continue
        name = _SITES.get(".".join(parts[3:]))
        if name == "rotary":  # one module serves all layers
            found |= {f"{layer} rotary": facts for layer in range(layers)}
        elif name:
            found[f"{parts[2]} {name}"] = facts
        if name == "attention":
            pages = {"route": one.route, "implementation": one.implementation, "parameters": {}}
            found[f"{parts[2]} KV cache"] = pages
        if name in ("MLP norm", "input norm"):
            residual = "attention residual" if name == "MLP norm" else "MLP residual"
            layer = int(parts[2]) - (name == "input norm")
            found[f"{layer} {residual}"] = {**facts, "parameters": {}}
        if one.name == "model.norm":
            found[f"{layers - 1} MLP residual"] = {**facts, "parameters": {}}
    found["-1 log-probability"] = {
        "route": state.plan.route("logp"),
        "implementation": class_name(sampler),
        "parameters": {},
    }
    return found


def _parameters(module: Any, boundary: str) -> dict[str, Any]:
    if boundary == "rms_norm":
        return {"eps": float(module.variance_epsilon)}
    if boundary == "attention":
        return {"scale": float(module.impl.scale)}
    if boundary == "rotary":
        cos, sin = (module.cos, module.sin) if hasattr(module, "cos") else module.cos_sin_cache.float().chunk(2, dim=-1)
        return {"base": table_base(cos, sin)}
    if boundary == "linear":
        bias = getattr(module, "bias", None)
        held = {"bias": bias is not None} if hasattr(module, "bias") else {}
        return held | ({"segments": module.segments * module.tp_size} if hasattr(module, "segments") else {})
    return {}
