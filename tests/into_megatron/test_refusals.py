"""What the trainer will not serve is refused before anything loads, and the message names the boundary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samebits.contract.routes import ModuleRoutes
from samebits.into_megatron.config import TrainerConfig
from samebits.into_megatron.model import read_shape
from samebits.into_megatron.plan import TrainLayout, plan
from samebits.testing.tiny_models import write_tiny_model

UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"num_experts": 8}, "ffn: mixture of experts"),
    "activation": ({"hidden_act": "gelu"}, "ffn: hidden_act 'gelu' is not silu"),
    "mlp-bias": ({"mlp_bias": True}, "ffn: mlp_bias"),
    "attention-bias": ({"attention_bias": True}, "attention: attention_bias"),
    "window": ({"use_sliding_window": True}, "attention: sliding-window"),
    "window-layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "attention: sliding-window"),
    "dropout": ({"attention_dropout": 0.1}, "attention: attention dropout"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary: rope scaling of type 'yarn'"),
    "llama3": ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "rotary: rope scaling"),
    "partial": ({"partial_rotary_factor": 0.5}, "rotary: partial rotary"),
    "quantised": ({"quantization_config": {"bits": 4}}, "linear: quantised weights"),
    "architecture": ({"architectures": ["MixtralForCausalLM"]}, "architecture .* is not served; served: Qwen3"),
    "no-rope": ({"rope_theta": None}, "rotary: rope_theta is missing"),
    "gqa": ({"num_key_value_heads": 3}, "attention: 4 query heads do not divide by 3"),
    "epsilon": ({"rms_norm_eps": None}, "rms_norm_eps must be a positive number, got None"),
    "size": ({"hidden_size": "wide"}, "hidden_size must be a positive integer, got 'wide'"),
}


@pytest.mark.parametrize("feature", UNSUPPORTED)
def test_unsupported_features_name_their_boundary(tmp_path: Path, feature: str) -> None:
    changes, message = UNSUPPORTED[feature]
    path = write_tiny_model(tmp_path)
    config = path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(ValueError, match=message):
        read_shape(path)


@pytest.mark.parametrize(("device", "transport"), [("cpu", "peer_memory"), ("cuda", "shared_memory")])
def test_memory_of_the_other_device_is_refused(device: Any, transport: Any) -> None:
    with pytest.raises(ValueError, match=f"transport {transport} carries tensors of"):
        TrainerConfig(model="", device=device, transport=transport)


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json here"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        read_shape(tmp_path)


def test_rope_base_is_read_from_either_place(tmp_path: Path) -> None:
    old = write_tiny_model(tmp_path / "old", rope_theta=5e5)
    new = write_tiny_model(
        tmp_path / "new", rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    assert read_shape(old).rope_base == read_shape(new).rope_base == 5e5


@pytest.mark.parametrize(
    ("sizes", "max_tp", "message"),
    [
        ({"tp": 8}, 8, r"attention: query heads \(4\) does not divide by 8; .* works: tp 4, "),
        ({"tp": 3}, 4, "tp 3 is not a power of two: the tree over ranks must be balanced; .* works: tp 2, "),
        ({"tp": 4}, 2, "max_tp 2 is not a multiple of tp 4: a rank must hold whole K segments; .* works: tp 2, "),
        ({"tp": 1}, 64, r"K of the down projection \(96\) does not divide by 64; .* works: none with this max_tp"),
        ({"pp": 4}, 1, r"layers over pp \* vpp chunks \(2\) does not divide by 4; .* works: tp 1, cp 1, pp 2, vpp 1,"),
        ({"pp": 2, "vpp": 2, "dp": 4}, 1, r"pp \* vpp chunks \(2\) does not divide by 4; .* pp 2, vpp 1, dp 4"),
        ({"vpp": 2}, 1, "virtual stages interleave .*: vpp > 1 needs pp > 1; .* vpp 1"),
        ({"cp": 6}, 1, "cp 6 is not a power of two.* cp 4, "),
        ({"tp": 2, "dp": 1 << 20, "vpp": 2}, 2, "vpp > 1 needs pp > 1; .* tp 2, cp 1, pp 1, vpp 1, dp 1048576"),
        ({"sequence_parallel": True}, 2, "sequence parallelism .* needs tp > 1; .* dp 1$"),
    ],
)
def test_layouts_that_cannot_be_served_are_refused_with_the_nearest_that_can(
    tmp_path: Path, sizes: dict[str, int], max_tp: int, message: str
) -> None:
    shape = read_shape(write_tiny_model(tmp_path))
    with pytest.raises(ValueError, match=message):
        plan(TrainLayout(**sizes), shape, max_tp)  # type: ignore[arg-type]


def test_more_ranks_than_key_value_heads_are_served(tmp_path: Path) -> None:
    plan(TrainLayout(tp=4, pp=2, dp=4), read_shape(write_tiny_model(tmp_path)), 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 3}, "tp must be a power of two"),
        ({"tp": 2}, "tp = 2 is larger than max_tp = 1; raise max_tp to 2"),
        ({"tp": 2, "max_tp": 2}, "rendezvous: more than one rank"),
        ({"cp": 2, "rendezvous": "x", "case": ModuleRoutes(attention="P")}, "attention: .* no context parallelism"),
        (
            {"tp": 2, "max_tp": 2, "rendezvous": "x", "sequence_parallel": True, "case": ModuleRoutes(ffn="P")},
            "norms: .* refuses sequence parallelism",
        ),
        ({"sequence_parallel": True}, "it needs tp > 1"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": float("inf")}, "temperature must be positive and finite"),
        ({"lr": -1.0}, "lr must not be negative"),
        ({"lr": float("nan")}, "lr must not be negative"),
        ({"max_tokens_per_gpu": 0}, "max_tokens_per_gpu must be at least 1"),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerConfig(model="m", **settings)


def test_a_case_is_r_or_p() -> None:
    with pytest.raises(ValueError, match="case of ffn must be 'R' or 'P', got 'Q'"):
        ModuleRoutes(ffn="Q")  # type: ignore[arg-type]
