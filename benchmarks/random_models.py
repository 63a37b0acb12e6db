"""Random models of Qwen3's sizes, made where they are needed: `python benchmarks/random_models.py 1.7b DIR SEED`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict

from samebits.testing.tiny_models import tensor_shapes

QWEN3: dict[str, dict[str, Any]] = {
    # not a size of Qwen3's, but with as many key/value heads as all of them
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 16,
        "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    },
    "1.7b": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
COMMON = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
TOKENIZER = Path(__file__).resolve().parents[1] / "src/samebits/presets/arithmetic/model"


def write_random_model(directory: Path, size: str, seed: int = 0) -> Path:
    """A model of this size with normal weights (deviation 0.02, norms 1) under `directory`, in Hugging Face form.

    Its tokenizer is the arithmetic preset's: prompts are words, what the model says is not.
    """
    config = {**COMMON, **QWEN3[size]}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TOKENIZER / name, directory / name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config):
        values = torch.ones(shape, device=device)
        if "norm" not in name:
            values = torch.randn(shape, generator=generator, device=device) * 0.02
        tensors[name] = values.bfloat16().cpu()
    save_torch_state_dict(tensors, directory, max_shard_size="2GB")
    return directory


if __name__ == "__main__":
    write_random_model(Path(sys.argv[2]), sys.argv[1], int(sys.argv[3]))
