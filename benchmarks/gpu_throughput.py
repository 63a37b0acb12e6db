"""Generated tokens per second of vLLM on a GPU at the sizes of Qwen3-8B: with samebits, as it is, batch-invariant.

`python benchmarks/gpu_throughput.py --commit HASH` where there are a GPU and vLLM. Every arm is an engine in a process
of its own; all of them share the card, so that they can take turns without starting again: while one computes, the
others wait. Weights are random, prompts too; every token is drawn at temperature 1 and comes with its log-probability.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samebits.into_vllm.engine import RolloutEngine

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "attention_bias": False,
    "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
ARMS = ("samebits", "native", "batch-invariant")
MAX_LEN, MAX_SEQS, STEP_TOKENS, CACHE_GIB = 4096, 64, 8192, 15
WARMING = 16  # tokens of a response that warms up, and the fewest of any
CAPTURED = (1, 2, 4, 8, 16, 32, 64)  # token counts of captured batches; vLLM's own list takes longer to start


@dataclass(frozen=True)
class Workload:
    """`batch` requests at once, each with a prompt of `given` tokens and a response of `tokens`."""

    batch: int
    given: int
    tokens: int

    @property
    def shape(self) -> str:
        return f"B={self.batch} {self.given}/{self.tokens}"


WORKLOADS = (
    Workload(1, 128, 128),
    Workload(8, 256, 256),
    Workload(32, 512, 256),
    Workload(64, 512, 256),
    Workload(32, 3000, 16),
)
Times = dict[str, dict[str, list[float]]]  # seconds of every round, by workload and arm
STEP, PROMPTS = "decode step", "prompts"
PROFILED = ((STEP, WORKLOADS[0]), (STEP, WORKLOADS[3]), (PROMPTS, WORKLOADS[4]))
LISTED = 25  # kernels of a profile, the longest
DECODED = 32  # steps of one token each, the difference of two responses
Kernels = dict[str, list[float]]  # name -> calls and microseconds on the device


def strict_engine(model: str) -> RolloutEngine:
    """The rollout engine with every module on the samebits route."""
    import torch

    from samebits.backends import device_arithmetic
    from samebits.contract import run_contract
    from samebits.contract.boundaries import BOUNDARIES
    from samebits.into_vllm.config import EngineConfig
    from samebits.into_vllm.engine import RolloutEngine

    arithmetic = device_arithmetic(torch.device("cuda", 0))
    return RolloutEngine(EngineConfig(
        model=model, contract=run_contract(BOUNDARIES, segments=1, arithmetic=arithmetic).as_data(), device="cuda",
        random_weights=True, max_model_len=MAX_LEN, max_num_seqs=MAX_SEQS, max_num_batched_tokens=STEP_TOKENS,
        block_size=16, kv_cache_gib=CACHE_GIB, prefix_caching=False, capture_sizes=CAPTURED,
    ))  # fmt: skip


class Strict:
    """`strict_engine`, as a run uses it."""

    def __init__(self, model: str) -> None:
        self._engine = strict_engine(model)

    def generate(self, prompts: list[list[int]], tokens: int) -> int:
        """How many tokens came."""
        from samebits.timeline.types import GenerateRequest, SampleKey

        requests = [
            GenerateRequest(SampleKey(0, number, 0), tuple(prompt), number, tokens, 1.0, ())
            for number, prompt in enumerate(prompts)
        ]
        return sum(len(rollout.token_ids) for rollout in self._engine.generate(requests))

    def kernels(self, compute: Callable[[], object]) -> Kernels:
        """The kernels that ran while `compute` did."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            compute()
        found: Kernels = {}
        for event in profiler.events():
            if event.device_type == DeviceType.CUDA:
                _add(found, event.name, 1, event.time_range.elapsed_us())
        return found


class Native:
    """vLLM's own LLM with its own choice of compiler, graphs, kernels and scheduling.

    FlashInfer's sampler is off: nothing limits what is drawn here, and the package need not be installed.
    """

    def __init__(self, model: str) -> None:
        from vllm import LLM

        self._traces = tempfile.mkdtemp()
        more = {"attention_backend": "FLASH_ATTN"} if os.environ.get("VLLM_BATCH_INVARIANT") == "1" else {}
        self._engine = LLM(
            model=model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=MAX_LEN,
            max_num_seqs=MAX_SEQS, max_num_batched_tokens=STEP_TOKENS, kv_cache_memory_bytes=CACHE_GIB << 30,
            gpu_memory_utilization=0.01, enable_prefix_caching=False, generation_config="vllm",
            compilation_config={"cudagraph_capture_sizes": list(CAPTURED)},
            profiler_config={
                "profiler": "torch", "torch_profiler_dir": self._traces, "torch_profiler_with_stack": False,
                "torch_profiler_dump_cuda_time_total": False,
            }, **more,
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], tokens: int) -> int:
        """How many tokens came."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
        outputs = self._engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def kernels(self, compute: Callable[[], object]) -> Kernels:
        """The kernels that ran while `compute` did, from the trace that vLLM writes."""
        before = set(Path(self._traces).iterdir())
        self._engine.start_profile()
        compute()
        self._engine.stop_profile()
        (trace,) = set(Path(self._traces).glob("*.json.gz")) - before
        found: Kernels = {}
        for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
                _add(found, event["name"], 1, event["dur"])
        return found


def _add(found: Kernels, name: str, calls: float, microseconds: float) -> None:
    held = found.setdefault(name, [0, 0])
    held[0] += calls
    held[1] += microseconds


def serve(arm: str, model: str) -> None:
    """One arm: a workload per line of standard input; per line of standard output the seconds that it took, or the
    kernels that ran, where these are wanted."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes where errors go
    engine = Strict(model) if arm == "samebits" else Native(model)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        work, seed, profiled = json.loads(line)
        random = Random(seed)
        prompts = [[random.randrange(1000, 150000) for _ in range(work["given"])] for _ in range(work["batch"])]
        if profiled:
            answer: Any = engine.kernels(partial(engine.generate, prompts, work["tokens"]))
        else:
            start = time.perf_counter()
            came = engine.generate(prompts, work["tokens"])
            answer = time.perf_counter() - start
            if came != work["batch"] * work["tokens"]:
                raise RuntimeError(f"{arm}: {came} tokens came, want {work['batch']} x {work['tokens']}")
        print(json.dumps(answer), file=answers, flush=True)


class Arm:
    """An engine in a process of its own."""

    def __init__(self, name: str, model: str, logs: Path) -> None:
        self.name = name
        self._log = (logs / f"{name}.log").open("w")
        command = [sys.executable, __file__, "--serve", name, "--model", model]
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        variables["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        if name == "batch-invariant":
            variables["VLLM_BATCH_INVARIANT"] = "1"
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=variables
        )

    def wait(self) -> None:
        """Until the engine serves. Raises RuntimeError where it does not."""
        self._read()

    def run(self, work: Workload, seed: int) -> float:
        """Seconds of one workload."""
        return float(self._ask(work, seed, profiled=False))

    def kernels(self, work: Workload) -> Kernels:
        """Calls and microseconds of every kernel of one workload."""
        return dict(self._ask(work, 0, profiled=True))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _ask(self, work: Workload, seed: int, profiled: bool) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([vars(work), seed, profiled]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: the engine ended; see {self._log.name}")
        return line


def measure(
    arms: list[Arm], works: list[Workload], rounds: int, end: float
) -> Iterator[dict[str, dict[str, list[float]]]]:
    """Seconds by workload and arm, after each round: arms take turns on each workload, in the other order each round.

    A round of short responses warms up. No round but the first begins where it would not be over at `end`, in seconds
    of the monotonic clock.
    """
    for work in works:
        for arm in arms:
            seconds = arm.run(replace(work, tokens=WARMING), seed=0)
            print(f"warm-up {work.shape} {arm.name}: {seconds:.1f} s", flush=True)
    taken: Times = {w.shape: {a.name: [] for a in arms} for w in works}
    longest = 0.0
    for turn in range(1, rounds + 1):
        start = time.monotonic()
        if start + longest > end:
            break
        for work in works:
            for arm in arms if turn % 2 else reversed(arms):
                seconds = arm.run(work, seed=turn)
                print(f"round {turn} {work.shape} {arm.name}: {work.batch * work.tokens / seconds:.0f}/s", flush=True)
                taken[work.shape][arm.name].append(seconds)
        longest = max(longest, time.monotonic() - start)
        yield taken


def records(taken: Times, works: list[Workload]) -> list[dict[str, Any]]:
    """One record per workload and peer."""
    rows = []
    for work in works:
        seconds = {name: median(times) for name, times in taken[work.shape].items()}
        for peer in seconds:
            if peer != "samebits":
                rows.append({
                    "what": "vLLM throughput", "shape": work.shape, "peer": peer, "tokens": work.batch * work.tokens,
                    "samebits_s": seconds["samebits"], "peer_s": seconds[peer],
                    "ratio": seconds[peer] / seconds["samebits"],
                    "repeats": {name: taken[work.shape][name] for name in ("samebits", peer)},
                })  # fmt: skip
    return rows


def profile(arm: Arm, what: str, work: Workload) -> dict[str, Any]:
    """One record of the kernels that run for all prompts, or in a decode step: what 32 tokens more take."""
    if what == PROMPTS:
        found = arm.kernels(replace(work, tokens=1))
    else:
        found = arm.kernels(replace(work, tokens=1 + WARMING + DECODED))
        for name, (count, spent) in arm.kernels(replace(work, tokens=1 + WARMING)).items():
            _add(found, name, -count, -spent)
        found = {name: [count / DECODED, spent / DECODED] for name, (count, spent) in found.items() if count > 0}
    ordered = sorted(found.items(), key=lambda entry: -entry[1][1])
    return {
        "what": what, "arm": arm.name, "shape": work.shape, "us": sum(spent for _, spent in found.values()),
        "kernels": [{"name": name[:120], "calls": count, "us": spent} for name, (count, spent) in ordered[:LISTED]],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds; a short one before them warms up")
    parser.add_argument("--shrink", type=int, default=1, help="divide the length of every response by this")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for all of it, starting included")
    parser.add_argument("--profile", action="store_true", help="then say which kernels take the time")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--serve", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.model)
        return
    from gpu_timing import origin
    from results import save

    works = [Workload(w.batch, w.given, max(WARMING, w.tokens // given.shrink)) for w in WORKLOADS]
    settings = {
        "max_model_len": MAX_LEN, "max_num_seqs": MAX_SEQS, "max_num_batched_tokens": STEP_TOKENS,
        "kv_cache_gib": CACHE_GIB, "captured": CAPTURED, "responses_divided_by": given.shrink,
    }  # fmt: skip
    about = {
        "origin": origin(given.commit), "command": "benchmarks/gpu_throughput.py " + " ".join(sys.argv[1:]),
        "settings": settings,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(QWEN3_8B))
        start = time.monotonic()
        arms = [Arm(name, model, given.logs) for name in given.arms]
        try:
            for arm in arms:
                arm.wait()
                print(f"{arm.name} serves after {time.monotonic() - start:.0f} s", flush=True)
            for taken in measure(arms, works, given.rounds, start + given.budget):
                rows = records(taken, works)
                save("gpu_throughput", {**about, "records": rows})
            profiles: list[dict[str, Any]] = []
            for what, work in PROFILED if given.profile else ():
                for arm in arms:
                    profiles.append(profile(arm, what, work))
                    print(f"{what} {work.shape} {arm.name}: {profiles[-1]['us']:.0f} us", flush=True)
                    save("gpu_throughput_profile", {**about, "records": profiles})
        finally:
            for arm in arms:
                arm.close()
    for row in rows:
        print(f"{row['shape']} {row['peer']}: {row['ratio']:.2f}")


if __name__ == "__main__":
    main()
