"""The places of a dense decoder that a trace names: tensors between boundaries, and the boundaries between them.

A point is one tensor, seen token by token. A site is one boundary in one layer: the points that it reads, the points
that it writes and the weights that it uses. Sites come in the order in which a token meets them, so the first site
that writes other bits on two sides has read the same bits on both.
"""

from __future__ import annotations

from typing import NamedTuple

EMBEDDING_LAYER = -1


class Point(NamedTuple):
    """One tensor: `layer` counts decoder layers from 0; the tensors before and behind them are layer -1 and L."""

    layer: int
    name: str

    def __str__(self) -> str:
        return f"{self.layer}.{self.name}"


class Site(NamedTuple):
    """One boundary in one layer. `weights` are Hugging Face names without `.weight`, `group` as in a case."""

    layer: int
    name: str
    boundary: str
    group: str
    reads: tuple[Point, ...]
    writes: tuple[Point, ...]
    weights: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name if self.name in ENDS else f"{self.name} of layer {self.layer}"


class _Kind(NamedTuple):
    """A site of every layer; `next.` marks the following layer's point."""

    name: str
    boundary: str
    group: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    weights: tuple[str, ...] = ()


_LAYER = (
    _Kind("input norm", "rms_norm", "attention", ("stream",), ("normed",), ("input_layernorm",)),
    _Kind(
        "qkv projection",
        "linear",
        "attention",
        ("normed",),
        ("q", "k", "v"),
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ),
    _Kind("q norm", "rms_norm", "attention", ("q",), ("q_normed",), ("self_attn.q_norm",)),
    _Kind("k norm", "rms_norm", "attention", ("k",), ("k_normed",), ("self_attn.k_norm",)),
    _Kind("rotary", "rotary", "attention", ("q_normed", "k_normed"), ("q_turned", "k_turned")),
    _Kind("KV cache", "copy", "attention", ("k_turned", "v"), ("keys", "values")),
    _Kind("attention", "attention", "attention", ("q_turned", "keys", "values"), ("mixed",)),
    _Kind("output projection", "linear", "attention", ("mixed",), ("attn_out",), ("self_attn.o_proj",)),
    _Kind("attention residual", "add", "ffn", ("stream", "attn_out"), ("stream_mid",)),
    _Kind("MLP norm", "rms_norm", "ffn", ("stream_mid",), ("ffn_normed",), ("post_attention_layernorm",)),
    _Kind("gate/up projection", "linear", "ffn", ("ffn_normed",), ("gate", "up"), ("mlp.gate_proj", "mlp.up_proj")),
    _Kind("SwiGLU", "swiglu", "ffn", ("gate", "up"), ("activated",)),
    _Kind("down projection", "linear", "ffn", ("activated",), ("ffn_out",), ("mlp.down_proj",)),
    _Kind("MLP residual", "add", "attention", ("stream_mid", "ffn_out"), ("next.stream",)),
)
# Sites that belong to no layer.
ENDS = ("embedding", "final norm", "LM head", "log-probability")

# Integers that say what was asked for, not what came out: one column each, kept as they are.
IDS, POSITIONS, TARGETS = (Point(EMBEDDING_LAYER, name) for name in ("ids", "positions", "targets"))
TEMPERATURE = Point(EMBEDDING_LAYER, "temperature")
ASKED = (IDS, POSITIONS, TARGETS, TEMPERATURE)


def sites(layers: int, *, qk_norm: bool, tied: bool) -> list[Site]:
    """Every site of a decoder with `layers` layers, in model order."""
    found = [
        Site(
            EMBEDDING_LAYER, "embedding", "embedding", "attention", (IDS,), (Point(0, "stream"),),
            ("model.embed_tokens",),
        )
    ]  # fmt: skip
    for layer in range(layers):
        found += [_site(kind, layer, qk_norm) for kind in _LAYER if qk_norm or kind.name not in ("q norm", "k norm")]
    stream, normed, logits = (Point(layers, name) for name in ("stream", "normed", "logits"))
    head = "model.embed_tokens" if tied else "lm_head"
    found += [
        Site(layers, "final norm", "rms_norm", "logp", (stream,), (normed,), ("model.norm",)),
        Site(layers, "LM head", "linear", "logp", (normed,), (logits,), (head,)),
        Site(layers, "log-probability", "logprob", "logp", (logits, TARGETS), (Point(layers, "logp"),)),
    ]
    return found


def _site(kind: _Kind, layer: int, qk_norm: bool) -> Site:
    names = {"next.stream": Point(layer + 1, "stream")}
    if not qk_norm:
        names |= {"q_normed": Point(layer, "q"), "k_normed": Point(layer, "k")}

    def points(given: tuple[str, ...]) -> tuple[Point, ...]:
        return tuple(names.get(name, Point(layer, name)) for name in given)

    return Site(
        layer=layer,
        name=kind.name,
        boundary=kind.boundary,
        group=kind.group,
        reads=points(kind.reads),
        writes=points(kind.writes),
        weights=tuple(f"model.layers.{layer}.{name}" for name in kind.weights),
    )
