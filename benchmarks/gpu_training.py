"""A training step of Megatron-Core on one GPU: the samebits route beside Megatron's own modules.

`python benchmarks/gpu_training.py --commit HASH`. Two trainers on one card, each in its own process, take
turns, and one waits meanwhile. Peers: Megatron's local modules (TransformerEngine and apex are not installed, so its
attention writes all scores), and the same with torch's scaled_dot_product_attention in place of that attention. All use
the same optimizer and gradient norm. Seconds are those of a whole step: forward, loss, backward, norm, clipping, Adam;
the device is idle before and after.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_timing import origin
from random_models import COMMON, QWEN3
from results import save
from torch import Tensor

from samebits.contract.routes import ModuleRoutes
from samebits.into_megatron.config import TrainerConfig
from samebits.into_megatron.model import ModelShape
from samebits.into_megatron.weights import EMBEDDING, HEAD, parameter_map
from samebits.rl.processes import Group, Host
from samebits.timeline.types import SampleKey, TrainSample

Shape = tuple[int, int]  # samples, tokens of each

PROMPT = 128
NATIVE = ModuleRoutes(attention="P", ffn="P", logp="P")
SIDES = {"samebits": (ModuleRoutes(), False), "megatron": (NATIVE, False), "megatron, sdpa": (NATIVE, True)}

# What each pair is timed on: Megatron's own attention keeps all scores of all layers, so less fits.
PAIRS: dict[str, tuple[Shape, ...]] = {"megatron, sdpa": ((8, 1024), (2, 4096)), "megatron": ((4, 1024),)}
ALONE: tuple[Shape, ...] = ((8, 1024),)


def samples(count: int, length: int) -> list[TrainSample]:
    """`count` samples of `length` tokens each; about what such a model says of its tokens."""
    draw, made = random.Random(5), []
    for index in range(count):
        ids = tuple(draw.randrange(COMMON["vocab_size"]) for _ in range(length))
        bits = struct.unpack("<I", struct.pack("<f", -12.0))[0]
        logp = (bits,) * (length - PROMPT)
        made.append(TrainSample(SampleKey(0, index, 0), ids, PROMPT, draw.uniform(-1, 1), logp))
    return made


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *unused: Any, **more: Any) -> Tensor:
    """Megatron's core attention, causal, by torch's fused kernel: [s, b, heads, dim] -> [s, b, heads * dim]."""
    heads = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


def random_parameters(path: str, shape: ModelShape, ranks: int, rank: int) -> dict[str, Tensor]:
    """What `load_parameters` would read from a model: made on the card, normal with deviation 0.02, norms 1."""
    generator = torch.Generator("cuda").manual_seed(0)

    def made(name: str, size: tuple[int, ...]) -> Tensor:
        if "norm" in name:
            return torch.ones(size, dtype=torch.bfloat16, device="cuda")
        return torch.randn(size, generator=generator, dtype=torch.bfloat16, device="cuda") * 0.02

    shard = {}
    for entry in parameter_map(shape):
        shard[entry.name] = entry.pack([made(entry.name, size) for size in entry.shapes], rank, ranks)
    if shape.tied:
        shard[HEAD] = shard[EMBEDDING]
    return shard


class Side:
    """One trainer; lives in a process of its own."""

    def __init__(self, config: TrainerConfig, fused: bool) -> None:
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        from samebits.into_megatron import building
        from samebits.into_megatron.trainer import TrainerRank

        building.load_parameters = random_parameters
        if fused:
            DotProductAttention.forward = attend
        self.trainer = TrainerRank(config, 0)
        self.batch: list[TrainSample] = []

    def prepare(self, count: int, length: int) -> None:
        made = samples(count, length)
        scores = self.trainer.score(made)
        self.batch = [replace(sample, rollout_logp_bits=scores[sample.key]) for sample in made]

    def step(self, number: int) -> dict[str, float]:
        return dict(self.trainer.train_step(number, self.batch).seconds)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def profile(self) -> dict[str, float]:
        """The kernels of one step that take the device longest, in ms, and "all" of them."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            self.step(0)
        events = [event for event in found.key_averages() if event.device_type == DeviceType.CUDA]
        events = [event for event in events if not event.key.startswith("Optimizer.")]  # a range of them, not a kernel
        taken = sorted(((event.key, event.self_device_time_total / 1e3) for event in events), key=lambda pair: -pair[1])
        return {"all": sum(ms for _, ms in taken), **dict(taken[:12])}

    def close(self) -> None:
        self.trainer.close()


def measure(
    model: Path, peer: str, shapes: Sequence[Shape], offload: float, repeats: int
) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    """samebits and one peer, side by side (what fits into the card's memory together): records, and kernels of each."""
    names = ["samebits", peer]
    group = Group(names, model)
    largest = max(count * length for count, length in shapes)
    try:
        arguments = []
        for case, fused in (SIDES[name] for name in names):
            config = TrainerConfig(
                model=str(model),
                device="cuda",
                case=case,
                lr=1e-6,
                optimizer_offload=offload,
                max_tokens_per_gpu=largest,
            )
            arguments.append((config, fused))
        group.gather("start", group.start(Side, arguments), 240)
        hosts = dict(zip(names, group.hosts, strict=True))
        found = [record(hosts, peer, shape, repeats) for shape in shapes]
        kernels = {name: host.call("profile").result() for name, host in hosts.items()}
    finally:
        group.kill()
    return found, kernels


def alone(model: Path, shape: Shape, offload: float, repeats: int) -> dict[str, Any]:
    """samebits with recomputed layers and no peer, where a card holds one trainer."""
    config = TrainerConfig(
        model=str(model), device="cuda", lr=1e-6, recompute=True, optimizer_offload=offload, max_tokens_per_gpu=1 << 20
    )
    side = Side(config, fused=False)
    side.prepare(*shape)
    steps = [side.step(number) for number in range(repeats + 2)][2:]
    return {
        "what": "training step, recomputed layers",
        "shape": "x".join(map(str, shape)),
        "parts": {part: median(step[part] for step in steps) for part in steps[0]},
        "peak_bytes": side.peak(),
        "totals": [step["total"] for step in steps],
    }


def record(hosts: dict[str, Host], peer: str, shape: Shape, repeats: int) -> dict[str, Any]:
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in hosts}
    for host in hosts.values():
        host.call("prepare", *shape).result()
    for number in range(repeats + 2):
        for name, host in hosts.items():
            seconds = host.call("step", number).result()
            if number >= 2:
                taken[name].append(seconds)
    parts = {name: {part: median(step[part] for step in steps) for part in steps[0]} for name, steps in taken.items()}
    ours, theirs = parts["samebits"]["total"], parts[peer]["total"]
    return {
        "what": "training step",
        "shape": "x".join(map(str, shape)),
        "peer": peer,
        "samebits_s": ours,
        "peer_s": theirs,
        "ratio": theirs / ours,
        "parts": parts,
        "peak_bytes": {name: host.call("peak").result() for name, host in hosts.items()},
        "totals": {name: [step["total"] for step in steps] for name, steps in taken.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--size", default="1.7b")
    parser.add_argument("--layers", type=int, help="so many layers of the size, where two trainers would not fit")
    parser.add_argument(
        "--offload", type=float, default=0.0, help="part of Adam's moments in host memory, on each side"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", nargs="*", default=list(PAIRS))
    parser.add_argument("--alone", action="store_true", help="no peer, layers recomputed: what one trainer takes")
    parser.add_argument("--name", default="gpu_training", help="of the record")
    given = parser.parse_args()
    shape = QWEN3[given.size] | ({"num_hidden_layers": given.layers} if given.layers else {})
    words = " ".join(word for word in sys.argv[1:] if word not in ("--commit", given.commit))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps({**COMMON, **shape}))
        measured = single(model, given) if given.alone else side_by_side(model, given)
    command = f"python benchmarks/gpu_training.py {words}".strip()
    about = {"model": given.size, "layers": shape["num_hidden_layers"], "optimizer_offload": given.offload}
    save(given.name, {"command": command, "origin": origin(given.commit), **about, **measured})


def single(model: Path, given: argparse.Namespace) -> dict[str, Any]:
    found = []
    for shape in ALONE:
        found.append(alone(model, shape, given.offload, given.repeats))
        print(found[-1], flush=True)
    return {"records": found}


def side_by_side(model: Path, given: argparse.Namespace) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    profile: dict[str, Any] = {"unit": "ms of the device in one step"}
    for peer in given.peers:
        records, kernels = measure(model, peer, PAIRS[peer], given.offload, given.repeats)
        if "shape" not in profile:  # that of the first pair
            profile |= {**kernels, "shape": records[-1]["shape"]}
        for each in records:
            print({name: each[name] for name in ("shape", "peer", "samebits_s", "peer_s", "ratio")}, flush=True)
            print(each["parts"], each["peak_bytes"], flush=True)
            found.append(each)
    return {"records": found, "profile": profile}


if __name__ == "__main__":
    main()
