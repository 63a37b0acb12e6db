"""Hugging Face <-> Megatron: bit-exact both ways, and strict about what is there."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from samebits.bits import assert_same
from samebits.into_megatron.model import read_shape
from samebits.into_megatron.weights import from_megatron, parameter_map, read_tensors, save_tensors, to_megatron
from samebits.testing.tiny_models import write_tiny_model

MODELS = {
    "qwen3": {"architecture": "Qwen3ForCausalLM"},
    "qwen3-tied": {"architecture": "Qwen3ForCausalLM", "tie_word_embeddings": True},
    "qwen2-bias": {"architecture": "Qwen2ForCausalLM", "num_attention_heads": 8},
    "llama": {"architecture": "LlamaForCausalLM", "head_dim": 128},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_round_trip_keeps_every_bit(tmp_path: Path, model: str, ranks: int) -> None:
    path = write_tiny_model(tmp_path, **MODELS[model])
    shape, tensors = read_shape(path), read_tensors(path)
    shards = [to_megatron(tensors, shape, rank, ranks) for rank in range(ranks)]
    back = from_megatron(shards, shape)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same(back[name], tensor, name)
    save_tensors(back, tmp_path / "again")
    for name, tensor in read_tensors(tmp_path / "again").items():
        assert_same(tensor, tensors[name], name)


def test_query_key_value_interleave_by_group(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    shape, tensors = read_shape(path), read_tensors(path)
    at, d = "model.layers.0.self_attn.", shape.head_dim
    q, k, v = (tensors[f"{at}{which}_proj.weight"] for which in "qkv")
    second = to_megatron(tensors, shape, 1, 2)["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert_same(second, torch.cat([q[2 * d :], k[d:], v[d:]]), "rank 1 of 2")


def test_gate_and_up_are_cut_before_they_are_stacked(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    shape, tensors = read_shape(path), read_tensors(path)
    gate, up = (tensors[f"model.layers.1.mlp.{which}_proj.weight"] for which in ("gate", "up"))
    first = to_megatron(tensors, shape, 0, 2)["decoder.layers.1.mlp.linear_fc1.weight"]
    assert_same(first, torch.cat([gate[:48], up[:48]]), "rank 0 of 2")


def test_padding_rows_of_the_vocabulary_are_zero(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    shape, tensors = read_shape(path), read_tensors(path)
    last = to_megatron(tensors, shape, 1, 2)["output_layer.weight"]
    assert last.shape == (51, shape.hidden)
    assert_same(last[50], torch.zeros(shape.hidden, dtype=torch.bfloat16), "row 101 of 102")


def test_every_parameter_has_its_own_sources(tmp_path: Path) -> None:
    mapped = parameter_map(read_shape(write_tiny_model(tmp_path, "Qwen2ForCausalLM")))
    sources = [name for entry in mapped for name in entry.sources]
    assert len(sources) == len(set(sources))
    assert len({entry.name for entry in mapped}) == len(mapped)


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    shape, tensors = read_shape(path), read_tensors(path)
    without = {name: t for name, t in tensors.items() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        to_megatron(without, shape, 0, 1)
    with pytest.raises(ValueError, match=r"does not have: model\.layers\.0\.self_attn\.q_proj\.bias"):
        to_megatron({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(256)}, shape, 0, 1)
    with pytest.raises(ValueError, match=r"model\.norm\.weight: expected bfloat16 \[64\], got bfloat16 \[63\]"):
        to_megatron({**tensors, "model.norm.weight": tensors["model.norm.weight"][:63]}, shape, 0, 1)
    with pytest.raises(ValueError, match=r"model\.norm\.weight: expected bfloat16 \[64\], got float32 \[64\]"):
        to_megatron({**tensors, "model.norm.weight": tensors["model.norm.weight"].float()}, shape, 0, 1)


def test_a_tied_head_may_be_stored_but_only_equal(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, tie_word_embeddings=True)
    shape, tensors = read_shape(path), read_tensors(path)
    table = tensors["model.embed_tokens.weight"]
    to_megatron({**tensors, "lm_head.weight": table.clone()}, shape, 0, 1)
    with pytest.raises(ValueError, match=r"lm_head\.weight: the model ties it"):
        to_megatron({**tensors, "lm_head.weight": table + 1}, shape, 0, 1)


def test_replicated_parameters_must_agree(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    shape, tensors = read_shape(path), read_tensors(path)
    shards = [to_megatron(tensors, shape, rank, 2) for rank in range(2)]
    shards[1]["decoder.final_layernorm.weight"] = shards[1]["decoder.final_layernorm.weight"] + 1
    with pytest.raises(RuntimeError, match=r"final_layernorm\.weight: rank 1 holds other bits"):
        from_megatron(shards, shape)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        read_tensors(tmp_path)


def test_an_index_of_several_files_is_followed(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    tensors = read_tensors(path)
    names = sorted(tensors)
    (path / "model.safetensors").unlink()
    weight_map = {}
    for part, chosen in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in chosen}, path / part)
        weight_map.update(dict.fromkeys(chosen, part))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_tensors(path).keys() == tensors.keys()


def test_what_could_not_be_written_is_named(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match=r"cannot write .*/model\.safetensors\.part: .*File too large"):
            save_tensors({"x": torch.zeros(1 << 20)}, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
