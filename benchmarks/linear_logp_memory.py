"""Peak memory of scoring and its backward pass: the samebits provider against Megatron-Core's own code.

    python benchmarks/linear_logp_memory.py            # prints the table, writes results/linear_logp_memory.json

Each measurement runs in a process of its own. Peak is the high-water mark of resident memory during forward and
backward, less what was resident before: inputs, weight and its fp32 gradient buffer are there already on both sides.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from results import provenance, save

VOCABULARY = 151_936
HIDDEN = 64
TOKENS = (64, 256, 1024)
SIDES = ("native", "samebits", "samebits with entropy")
MIB = 1 << 20


def main() -> None:
    """Measure every side at every size, one process after the other."""
    rows = []
    for tokens in TOKENS:
        for side in SIDES:
            command = [sys.executable, "-W", "ignore", __file__, side, str(tokens)]
            answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows.append(json.loads(answer.splitlines()[-1]))
            print(f"{side:22} T={tokens:5}  peak {rows[-1]['peak_mib']:8.1f} MiB", flush=True)
    record = {
        "what": "peak resident memory of log-probability, forward and backward, above inputs, weight and main_grad",
        **provenance(),
        "vocabulary": VOCABULARY,
        "hidden": HIDDEN,
        "logits_mib_fp32": {str(tokens): round(tokens * VOCABULARY * 4 / MIB, 1) for tokens in TOKENS},
        "rows": rows,
    }
    save("linear_logp_memory", record)


def measure(side: str, tokens: int) -> dict[str, object]:
    """One side at one size, in this process."""
    import torch

    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, HIDDEN, generator=draw).bfloat16().requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=draw).bfloat16().mul_(0.1).requires_grad_()
    weight.main_grad = torch.zeros(VOCABULARY, HIDDEN)  # type: ignore[attr-defined]
    weight.main_grad += 0.0  # type: ignore[attr-defined]
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=draw)
    score = _native() if side == "native" else _samebits(side)
    score(hidden[:1], weight, targets[:1]).backward()
    hidden.grad = weight.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _status("VmRSS")
    started = time.perf_counter()
    score(hidden, weight, targets).backward()
    seconds = time.perf_counter() - started
    peak = (_status("VmHWM") - before) / MIB
    return {"side": side, "tokens": tokens, "peak_mib": round(peak, 1), "seconds": round(seconds, 2)}


def _native() -> Callable[..., object]:
    """Megatron-Core's output layer and cross entropy, as its GPT model calls them."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from samebits.into_megatron.config import TrainerConfig
    from samebits.into_megatron.parallel import start_groups

    start_groups(TrainerConfig(model=""), 0)
    return lambda hidden, weight, targets: vocab_parallel_cross_entropy(
        (hidden @ weight.t()).float()[:, None], targets[:, None]
    ).sum()


def _samebits(side: str) -> Callable[..., object]:
    from samebits.linear_logp import LinearLogpContext, LinearLogpRequest, LinearProjection, VocabPartition
    from samebits.linear_logp.provider import provider

    entropy = side.endswith("entropy")
    part = VocabPartition(0, VOCABULARY, VOCABULARY, VOCABULARY)

    def score(hidden, weight, targets):  # type: ignore[no-untyped-def]
        context = LinearLogpContext(hidden, LinearProjection(weight), part)
        result = provider(
            LinearLogpRequest(None, targets, context=context, with_entropy=entropy, with_entropy_grad=entropy)
        )
        return -result.logp.sum() if result.entropy is None else -result.logp.sum() - result.entropy.sum()

    return score


def _status(name: str) -> int:
    """Bytes of one line of this process's memory status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
