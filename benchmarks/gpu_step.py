"""Where a decode step of the strict engine goes, kernel by kernel, at the sizes of Qwen3-8B.

`python benchmarks/gpu_step.py --commit HASH` on a machine with a GPU and vLLM. Steps are timed on the host first, then
six more run under torch's profiler, which makes them slower but says what each kernel took.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from gpu_throughput import QWEN3_8B, strict_engine
from gpu_timing import origin
from results import save
from torch.profiler import ProfilerActivity, profile

from samebits.timeline.types import GenerateRequest, SampleKey

BATCHES = ((1, 128), (32, 512), (64, 512))  # requests, tokens of a prompt
FIRST, TIMED, PROFILED = 12, 58, 6


def decode(engine: Any, batch: int, given: int) -> dict[str, Any]:
    """One record: the median step, and calls and microseconds of each kernel in one step."""
    random = Random(batch)
    for number in range(batch):
        prompt = tuple(random.randrange(1000, 150000) for _ in range(given))
        tokens = FIRST + TIMED + 40
        engine._submit(str(number), GenerateRequest(SampleKey(0, number, 0), prompt, number, tokens, 1.0, ()))
    steps, before = [], time.perf_counter()
    for _ in range(FIRST + TIMED):
        engine._engine.step()
        steps.append(time.perf_counter() - before)
        before += steps[-1]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            engine._engine.step()
        torch.cuda.synchronize()
    while engine._engine.has_unfinished_requests():
        engine._engine.step()
    kernels: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            held = kernels.setdefault(event.name, [0.0, 0.0])
            held[0] += 1 / PROFILED
            held[1] += event.time_range.elapsed_us() / PROFILED
    ordered = sorted(kernels.items(), key=lambda entry: -entry[1][1])
    return {
        "what": "decode step", "shape": f"B={batch} after {given}", "median_s": median(steps[FIRST:]),
        "kernels": [{"name": name, "calls": calls, "us": us} for name, (calls, us) in ordered],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True)
    commit = parser.parse_args().commit
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(QWEN3_8B))
        engine = strict_engine(model)
        records = [decode(engine, *sizes) for sizes in BATCHES]
        engine.close()
    save("gpu_step", {"origin": origin(commit), "command": "benchmarks/gpu_step.py", "records": records})
    for record in records:
        print(f"{record['shape']}: {record['median_s'] * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
