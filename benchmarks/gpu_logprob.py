"""LM head and log-probability in one, at the size of Qwen3-8B, beside plain torch and Liger-Kernel's fused form.

`python benchmarks/gpu_logprob.py --commit HASH` on a machine with a GPU. Operations are counted as 2 T V H forward and
4 T V H backward, also where logits are computed again.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable

import torch
from gpu_timing import eager_in_turn, origin, peak_bytes
from results import save
from torch import Tensor

from samebits.ops.logprob import linear_logp

HIDDEN, VOCABULARY = 4096, 151_936
TOKENS = (1024, 2048, 4096, 8192)


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Whole logits, fp32 log-softmax."""
    return torch.log_softmax((hidden @ weight.t()).float(), -1).gather(1, targets[:, None])[:, 0]


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Liger's fused linear cross entropy: it computes its gradients in the forward pass."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    out = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets, None, None, -100, 0.0, 0.0, "sum")
    return out[0] if isinstance(out, tuple) else out


def measure(tokens: int, functions: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]) -> list[dict[str, object]]:
    """Forward alone, then forward and backward, of every function."""
    hidden = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    weight = (0.02 * torch.randn(VOCABULARY, HIDDEN, device="cuda")).bfloat16()
    targets = torch.randint(0, VOCABULARY, (tokens,), device="cuda")
    upstream = torch.randn(tokens, device="cuda")
    operations = 2 * tokens * VOCABULARY * HIDDEN

    def forward(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        with torch.no_grad():
            return function(hidden, weight, targets)

    def both(name: str, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        if name == "samebits":
            w.main_grad = main_grad  # type: ignore[attr-defined]
        out = function(h, w, targets)
        out.backward(upstream if out.ndim else None)

    main_grad = torch.zeros(VOCABULARY, HIDDEN, device="cuda")
    works: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {n: lambda f=f: forward(f) for n, f in functions.items() if n != "liger"},
        "forward and backward": {n: lambda n=n, f=f: both(n, f) for n, f in functions.items()},
    }
    records: list[dict[str, object]] = []
    forward_s = 0.0
    for what, sides in works.items():
        times = eager_in_turn(sides, repeats=3)
        peaks = {name: peak_bytes(side) for name, side in sides.items()}
        count, backward = operations * (1 if what == "forward" else 3), {}
        if what == "forward":
            forward_s = times["samebits"]
        else:
            backward = {"samebits_backward_tflops": 2 * operations / (times["samebits"] - forward_s) / 1e12}
        for peer in sides:
            if peer == "samebits":
                continue
            records.append({
                "what": f"LM head and log-probability, {what}", "shape": f"T={tokens} H={HIDDEN} V={VOCABULARY}",
                "peer": peer, "samebits_s": times["samebits"], "peer_s": times[peer],
                "ratio": times[peer] / times["samebits"], "samebits_tflops": count / times["samebits"] / 1e12,
                "peer_tflops": count / times[peer] / 1e12, "samebits_peak_bytes": peaks["samebits"],
                "peer_peak_bytes": peaks[peer],
                **backward,
            })  # fmt: skip
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True)
    commit = parser.parse_args().commit
    functions: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"samebits": linear_logp, "torch": naive}
    if importlib.util.find_spec("liger_kernel") is not None:
        functions["liger"] = liger
    records = [record for tokens in TOKENS for record in measure(tokens, functions)]
    save("gpu_logprob", {"origin": origin(commit), "records": records})
    for r in records:
        print(f"{r['what']} {r['shape']} {r['peer']}: {r['samebits_tflops']:.0f} TFLOP/s, ratio {r['ratio']:.2f}")


if __name__ == "__main__":
    main()
