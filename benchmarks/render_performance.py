"""Render docs/performance.md from the records in benchmarks/results: `python benchmarks/render_performance.py`.

A section is a function from a file's content to Markdown, listed in SECTIONS under the file's name; a file that does
not exist leaves its section out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/performance.md"
HEAD = """# Performance

Side by side on one card, medians of repeats that take turns; raw records are in `benchmarks/results/`. A ratio is the
peer's time over ours: above 1 we are faster. This page is written by `benchmarks/render_performance.py`.
"""

Data = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def origin(data: Data) -> str:
    """Where the records come from, in one line."""
    o = data["origin"]
    versions = ", ".join(f"{name} {number}" for name, number in o["versions"].items() if number)
    driver = o["driver"] or "not recorded"
    return f"{o['card']}, driver {driver}, CUDA {o['cuda']}, {versions}; commit `{o['commit'][:12]}`."


def geometric_mean(values: Sequence[float]) -> float:
    """The n-th root of the product."""
    return math.exp(sum(math.log(v) for v in values) / len(values))


def linear(data: Data) -> str:
    """Linear maps beside torch.mm."""
    records = data["records"]
    rows = sorted({r["m"] for r in records})
    summary = []
    for m in rows:
        here = [r for r in records if r["m"] == m]
        ratios, own = [r["ratio"] for r in here], [r["own_ratio"] for r in here]
        cells = (geometric_mean(ratios), min(ratios), geometric_mean(own), min(own))
        summary.append([str(m), *(f"{c:.2f}" for c in cells), str(sum(r["certified"] for r in here))])
    few, many = ([r["ratio"] for r in records if keep(r["m"])] for keep in (lambda m: m <= 64, lambda m: m >= 512))
    lowest = min(r["ratio"] for r in records)
    names = sorted({(r["n"], r["k"], r["what"]) for r in records}, key=lambda s: (s[2].split()[-1], s[2]))
    every = [[what, f"{n} x {k}", *(_ratio(records, m, n, k, what) for m in rows)] for n, k, what in names]
    return "\n\n".join((
        "## Linear maps",
        "The weights of Qwen3-8B split over 1, 2, 4 and 8 ranks, M rows of input, against `torch.mm`, in captured "
        "graphs; weights rotate through more memory than the L2 cache holds. `own` is the Triton kernel alone; a run "
        "takes the vendor's product where a certificate exists (its bits were those of the contract on random and "
        "adversarial inputs, eagerly and in a graph) and it is the faster one.",
        origin(data),
        f"Geometric mean {geometric_mean(few):.3f} for M <= 64 and {geometric_mean(many):.3f} for M >= 512 (wanted: "
        f"0.97 both); lowest single ratio {lowest:.2f} (wanted: 0.85).",
        table(["M", "geometric mean", "lowest", "own: geometric mean", "own: lowest", "certified shapes"], summary),
        "Every ratio:",
        table(["weight", "N x K", *(f"M={m}" for m in rows)], every),
    ))  # fmt: skip


def _ratio(records: list[Data], m: int, n: int, k: int, what: str) -> str:
    found = [r for r in records if (r["m"], r["n"], r["k"], r["what"]) == (m, n, k, what)]
    return f"{found[0]['ratio']:.2f}" + ("*" if found[0]["certified"] else "") if found else ""


def logprob(data: Data) -> str:
    """LM head with log-probability."""
    rows = []
    for r in data["records"]:
        alone = r.get("samebits_backward_tflops")
        rows.append([
            r["what"].split(", ")[1], r["shape"], r["peer"], f"{r['samebits_s'] * 1e3:.2f}", f"{r['peer_s'] * 1e3:.2f}",
            f"{r['ratio']:.2f}", f"{r['samebits_tflops']:.0f}", f"{alone:.0f}" if alone else "",
            f"{r['samebits_peak_bytes'] / 2**20:.0f}", f"{r['peer_peak_bytes'] / 2**20:.0f}",
        ])  # fmt: skip
    head = [
        "what",
        "shape",
        "peer",
        "ours, ms",
        "peer, ms",
        "ratio",
        "TFLOP/s",
        "backward alone",
        "extra MiB",
        "peer MiB",
    ]
    return "\n\n".join((
        "## LM head and log-probability",
        "Operations are counted as 2 T V H forward and 4 T V H backward; computing the logits again in the backward "
        "pass is not counted. Extra memory is the peak above what was held before, gradients that a pass returns "
        "included; ours adds the weight's gradient to an fp32 `main_grad` that exists before.",
        origin(data),
        table(head, rows),
    ))  # fmt: skip


# what was wanted of each part: (words, operation, peer, goal)
ATTENTION_GOALS = (
    ("decode", "decode", "FlashAttention 3", 0.97),
    ("training forward", "training forward", "FlashAttention 3", 0.90),
    ("prefill from pages", "prefill from pages", "FlashAttention 3", 0.90),
    ("backward", "backward", "torch's flash", 0.85),
)


def attention(data: Data) -> str:
    """Attention beside FlashAttention 3 and torch."""
    records = data["records"]
    met = []
    for words, what, peer, goal in ATTENTION_GOALS:
        ratios = [r["ratio"] for r in records if r["what"] == what and r["peer"] == peer]
        if ratios:
            mean = geometric_mean(ratios)
            cells = (f"{mean:.2f}", f"{min(ratios):.2f}", f"{goal:.2f}", "yes" if mean >= goal else "**no**")
            met.append([words, peer, *cells])
    decode = [r for r in records if r["what"] == "decode"]
    contexts = sorted({r["context"] for r in decode})
    grid = [
        [str(batch), *(_decode_cell(decode, batch, context) for context in contexts)]
        for batch in sorted({r["batch"] for r in decode})
    ]
    whole = [
        [
            r["what"], str(r["tokens"]), r["peer"], f"{r['samebits_s'] * 1e3:.3f}", f"{r['peer_s'] * 1e3:.3f}",
            f"{r['ratio']:.2f}", f"{r['tflops']:.0f}", f"{r['peer_tflops']:.0f}",
        ]
        for r in records
        if r["what"] != "decode"
    ]  # fmt: skip
    head = ["what", "tokens", "peer", "ours, ms", "peer, ms", "ratio", "TFLOP/s", "peer TFLOP/s"]
    return "\n\n".join((
        "## Attention",
        "32 query heads, 8 heads of keys, head size 128, bf16, pages of 16 tokens in shuffled order, in captured "
        "graphs (the backward pass and its peers eagerly). Operations are counted as 2 T^2 x 32 x 128 forward (causal) "
        "and 2.5 times that backward; our backward computes the scores twice, which is not counted. "
        "FlashAttention 3 is that of the vLLM 0.25.1 wheel with its own heuristics.",
        origin(data),
        table(["what", "peer", "geometric mean", "lowest", "wanted", "reached"], met),
        "Decode: peer's time over ours (our time in microseconds), batch by context:",
        table(["batch", *map(str, contexts)], grid),
        table(head, whole),
    ))  # fmt: skip


def _decode_cell(records: list[Data], batch: int, context: int) -> str:
    found = [r for r in records if (r["batch"], r["context"]) == (batch, context)]
    return f"{found[0]['ratio']:.2f} ({found[0]['samebits_s'] * 1e6:.0f})" if found else ""


def elementwise(data: Data) -> str:
    """RMSNorm, rotary, SwiGLU beside vLLM's kernels and torch's."""
    records = data["records"]
    rows = []
    for what, shape in dict.fromkeys((r["what"], r["shape"]) for r in records):
        here = {r["peer"]: r for r in records if (r["what"], r["shape"]) == (what, shape)}
        ours = next(iter(here.values()))["samebits_s"]
        ratios = (f"{here[peer]['ratio']:.2f}" if peer in here else "" for peer in ("vLLM", "torch"))
        rows.append([what, shape, f"{ours * 1e6:.1f}", *ratios])
    means = [
        f"{what} {geometric_mean([r['ratio'] for r in records if r['what'] == what and r['peer'] == 'vLLM']):.2f}"
        for what in dict.fromkeys(r["what"] for r in records if r["peer"] == "vLLM")
    ]
    return "\n\n".join((
        "## RMSNorm, rotary, SwiGLU",
        "Sizes of Qwen3-8B, bf16, in captured graphs, inputs rotating through more memory than the L2 cache holds. "
        "torch is its own fused norm and plain operations for the rest, not compiled; vLLM's kernels "
        "are those of its 0.25.1 wheel.",
        origin(data),
        f"Geometric mean against vLLM's kernels (wanted: 1.0): {', '.join(means)}." if means else "",
        table(["what", "shape", "ours, us", "against vLLM", "against torch"], rows),
    ))  # fmt: skip


def throughput(data: Data) -> str:
    """Generated tokens per second beside vLLM's own."""
    rows = []
    for shape in dict.fromkeys(r["shape"] for r in data["records"]):
        here = {r["peer"]: r for r in data["records"] if r["shape"] == shape}
        first = next(iter(here.values()))
        speeds = [first["tokens"] / first["samebits_s"]]
        speeds += [here[peer]["tokens"] / here[peer]["peer_s"] for peer in THROUGHPUT_PEERS if peer in here]
        rows.append([
            shape, *(f"{speed:.0f}" for speed in speeds),
            *(f"{here[peer]['ratio']:.2f}" for peer in THROUGHPUT_PEERS if peer in here),
        ])  # fmt: skip
    means = {
        peer: geometric_mean([r["ratio"] for r in data["records"] if r["peer"] == peer])
        for peer in THROUGHPUT_PEERS
        if any(r["peer"] == peer for r in data["records"])
    }
    said = ", ".join(f"{mean:.2f} against {peer}" for peer, mean in means.items())
    repeats = min(len(times) for r in data["records"] for times in r["repeats"].values())
    cards = data["settings"].get("tp", 1)
    return "\n\n".join((
        "## vLLM throughput" + (f", {cards} cards" if cards > 1 else ""),
        f"Generated tokens per second at the sizes of Qwen3-8B, TP{cards}, random weights; every token is drawn at "
        "temperature 1 and comes with its log-probability. A workload is so many requests at once, with prompts and "
        "responses of so many tokens. samebits has every module on its route, native is vLLM with its own compiler, "
        "graphs, kernels and scheduling, batch-invariant is vLLM under `VLLM_BATCH_INVARIANT=1`. All engines lie on "
        f"the card at once and take turns; {repeats} rounds after one that warms up; all capture "
        f"batches of the same sizes, up to {max(data['settings']['captured'])} tokens.",
        origin(data),
        f"Geometric mean {said} (wanted: 0.97 of native in each workload).",
        table(["workload", "samebits", *(f"{p}" for p in means), *(f"against {p}" for p in means)], rows),
    ))  # fmt: skip


# rows of the tables of where the time goes, and what the names of their kernels hold
PARTS = (
    ("linear maps, LM head", ("matmul_", "nvjet_", "cublas")),
    ("attention", ("forward_rows", "chunk_states", "merge_chunks", "flash::")),
    ("norms of the stream", ("norm_forward", "norm_row", "fused_add_rms_norm")),
    ("QK-norm, rotary, keys and values", (
        "prepare_heads", "reshape_and_cache", "triton_poi_fused_4", "triton_red_fused_3",
    )),
    ("SwiGLU", ("swiglu", "fused_mul_silu")),
    ("draw and log-probability", (
        "row_states", "merge_states", "block_sums", "choose", "finish_logp", "_topk_log_softmax", "_gumbel",
    )),
)  # fmt: skip


def throughput_profile(data: Data) -> str:
    """Where the device's time goes in each engine."""
    tables = []
    kinds = (("decode step", "microseconds of a decode step", 1.0), ("prompts", "milliseconds for all prompts", 1e-3))
    for what, unit, scale in kinds:
        records = [r for r in data["records"] if r["what"] == what]
        columns = [[us * scale for us in _parts(record)] for record in records]
        names = [*(name for name, _ in PARTS), "all other kernels and copies", "**all**"]
        rows = [[name, *(f"{column[at]:.0f}" for column in columns)] for at, name in enumerate(names)]
        heads = [f"{r['shape'].partition('/')[0]}, {r['arm']}" for r in records]
        tables += [f"In {unit}, by requests and tokens of a prompt:", table(["part", *heads], rows)]
    return "\n\n".join((
        "## Where the time goes in vLLM",
        "Kernels as torch's profiler saw them, by what they compute, of the engines above on some of the workloads. A "
        "decode step is the mean of 32, from responses of different length.",
        origin(data), *tables,
    ))  # fmt: skip


def _parts(record: Data) -> list[float]:
    """Microseconds of each part, of all other kernels, and of all."""
    found = [sum(k["us"] for k in record["kernels"] if any(text in k["name"] for text in texts)) for _, texts in PARTS]
    return [*found, record["us"] - sum(found), record["us"]]


THROUGHPUT_PEERS = ("native", "batch-invariant")


def training(data: Data) -> str:
    """A step of Megatron-Core on both routes, and which kernels take the device's time."""
    rows = [
        [r["shape"].replace("x", " x "), r["peer"], f"{r['samebits_s']:.3f}", f"{r['peer_s']:.3f}", f"{r['ratio']:.2f}"]
        for r in data["records"]
    ]
    profile = data["profile"]
    sides = ["samebits", *(r["peer"] for r in data["records"] if r["shape"] == profile["shape"])]
    longest = [sorted(profile[side].items(), key=lambda item: -item[1])[:6] for side in sides]
    kernels = [[f"`{name[:60]}` {ms:.0f}" for name, ms in both] for both in zip(*longest, strict=True)]
    return "\n\n".join((
        "## Training step",
        "Megatron-Core on one card, a random model of Qwen3-1.7B's size: forward, loss, backward, norm, clipping, "
        "Adam, with one micro-batch of samples x tokens. The peer is Megatron's own local modules, here with torch's "
        "scaled_dot_product_attention (cuDNN's kernels) as core attention; TransformerEngine and apex were not there.",
        origin(data),
        *([data["note"]] if "note" in data else []),
        table(["samples x tokens", "peer", "ours, s", "peer, s", "ratio (wanted: 0.95)"], rows),
        f"Longest kernels of one step at {profile['shape'].replace('x', ' x ')}, in ms of the device:",
        table(sides, kernels),
    ))  # fmt: skip


def norm_launches(data: Data) -> str:
    """RMSNorm of wide rows under each launch."""
    records = data["records"]
    launches = list(dict.fromkeys(r["launch"] for r in records))
    rows = [
        [what, shape, *(f"{r['ratio']:.2f} ({r['samebits_s'] * 1e6:.1f})" for r in _norms(records, what, shape))]
        for what, shape in dict.fromkeys((r["what"], r["shape"]) for r in records)
    ]
    for what in dict.fromkeys(r["what"] for r in records):
        ratios = [[r["ratio"] for r in records if (r["what"], r["launch"]) == (what, launch)] for launch in launches]
        rows.append([what, "geometric mean", *(f"{geometric_mean(r):.2f}" for r in ratios)])
    return "\n\n".join((
        "## RMSNorm by launch",
        "4096 columns, bf16, in captured graphs: vLLM's time over ours (our time in microseconds) for each launch; all "
        "of them give the same bits. `shared` is the form for NVIDIA in which a row goes through shared memory.",
        origin(data),
        *([data["origin"]["note"]] if "note" in data["origin"] else []),
        table(["what", "shape", *(f"`{launch}`" for launch in launches)], rows),
    ))  # fmt: skip


def _norms(records: list[Data], what: str, shape: str) -> list[Data]:
    return [r for r in records if (r["what"], r["shape"]) == (what, shape)]


def collectives(data: Data) -> str:
    """All-reduce over peer memory beside NCCL and vLLM's custom all-reduce."""
    parts = []
    for mode in dict.fromkeys(r["mode"] for r in data["records"]):
        records = [r for r in data["records"] if r["mode"] == mode]
        sides = [side for side in records[0] if side not in ("mode", "bytes")]
        rows = [
            [
                _size(r["bytes"]), *(f"{r[side] * 1e6:.1f}" if side in r else "" for side in sides),
                *(f"{_best_peer(r, kind) / r[ours]:.2f}" for ours, kind in COLLECTIVES_PAIRS),
            ]
            for r in records
        ]  # fmt: skip
        met = [sum(_best_peer(r, kind) / r[ours] >= 1 / 1.1 for r in records) for ours, kind in COLLECTIVES_PAIRS]
        head = ["partial sums", *(f"{side}, us" for side in sides), "best bf16", "best fp32"]
        parts += [
            f"{mode.capitalize()}: within 1.1 times the best peer that adds fp32 at {met[1]} of {len(records)} sizes, "
            f"and of the best that adds bf16, which is half the bytes, at {met[0]}.",
            table(head, rows),
        ]
    return "\n\n".join((
        "## All-reduce",
        f"{data['ranks']} ranks with a card each, NVLink. A size is that of the fp32 partial sums of a rank; every "
        "side adds as many values. `strict` is the contract's tree in fp32 with one rounding to bf16, `strict fp32` "
        "the same not rounded; peers add bf16, as a native layer does, or fp32. The last columns are the best peer's "
        "time over ours: of `strict` beside bf16 and of `strict fp32` beside fp32. Multicast is off on these machines. "
        "vLLM is its custom all-reduce (0.25.1), in graphs with registered buffers.",
        origin(data),
        *parts,
    ))  # fmt: skip


COLLECTIVES_PAIRS = (("strict", "bf16"), ("strict fp32", "fp32"))


def _best_peer(record: Data, kind: str) -> float:
    return min(record[f"{who} {kind}"] for who in ("NCCL", "vLLM") if f"{who} {kind}" in record)


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def reference_workload(data: Data) -> str:
    """The steps of a run of the reference workload that was cut off, as its timeline has them."""
    steps: dict[int, Data] = {}
    for event in data["events"]:
        if event["kind"] != "published":
            steps.setdefault(event["step"], {})[event["kind"]] = event
    rows = []
    for number, found in steps.items():
        seconds = found.get("timed", {"seconds": {}})["seconds"]
        times = [f"{seconds[part]:.1f}" if part in seconds else "" for part in ("generate", "publish")]
        compared = found["compared"]
        differ = [f"{compared['compared_tokens']:,}", str(compared["mismatch_count"])]
        rows.append([str(number), *differ, f"{found['trained']['seconds']['total']:.1f}", *times])
    return "\n\n".join((
        "## The reference workload",
        "R/R at the sizes of Qwen3-8B, random weights, bf16: 1 prompt x 8 samples, responses of up to 7,168 tokens, "
        "KL coefficient 0.001, seeds 1234, two engines, weights by CUDA IPC (`benchmarks/reference_workload.py`). Two "
        "cards: a trainer of TP2, engines of one worker. The run was cut off while its second step's weights were "
        "published, so it has no seal and no verdict.",
        origin(data),
        table(["step", "log-probabilities", "differ", "training, s", "responses, s", "publication, s"], rows),
    ))  # fmt: skip


SECTIONS: dict[str, Callable[[Data], str]] = {
    "gpu_linear": linear,
    "gpu_logprob": logprob,
    "gpu_attention": attention,
    "gpu_elementwise": elementwise,
    "gpu_training": training,
    "gpu_norm_launches": norm_launches,
    "gpu_throughput": throughput,
    "gpu_throughput_tp2": throughput,
    "gpu_throughput_profile": throughput_profile,
    "gpu_collectives": collectives,
    "reference_workload_interrupted": reference_workload,
}


def page() -> str:
    """The whole page."""
    parts = [HEAD.strip()]
    for name, section in SECTIONS.items():
        path = ROOT / "benchmarks/results" / f"{name}.json"
        if path.exists():
            parts.append(section(json.loads(path.read_text(encoding="utf-8"))))
        notes = ROOT / "benchmarks/notes" / f"{name}.md"
        if notes.exists():
            parts.append(notes.read_text(encoding="utf-8").strip())
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
