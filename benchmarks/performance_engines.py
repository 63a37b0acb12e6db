"""Sections of docs/performance.md about whole engines. A section is a function from a record to Markdown."""

from __future__ import annotations

from performance_tables import Data, geometric_mean, origin, table


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


def reference_workload(data: Data) -> str:
    """Whole steps of the reference workload on both routes, with its published figures."""
    rows = [
        [
            r["arm"], str(r["cards"]), f"{r['steps']}", f"{sum(s['compared_tokens'] for s in r['by_step']):,}",
            f"{sum(s['mismatch_count'] for s in r['by_step']):,}",
            f"{max(s['max_abs_diff'] for s in r['by_step']):.3g}",
            f"{r['seconds_per_step']:.2f}", f"{r['tokens_per_gpu_s']:.2f}", f"{_tokens_per_gpu_s(r):.2f}",
        ]
        for r in data["records"]
    ]  # fmt: skip
    published, gap = data["published"], ["", "", ""]
    rows += [
        [
            f"{arm}, published", "8 x MI300X", "200", *gap, f"{seconds:.2f}",
            f"{published['tokens_per_gpu_s'][arm]:.2f}", "",
        ]
        for arm, seconds in published["seconds_per_step"].items()
    ]  # fmt: skip
    phases = sorted({name for r in data["records"] for step in r["phases"] for name in step})
    by_phase = [
        [r["arm"], *(" ".join(f"{step[p]:.1f}" for step in r["phases"]) for p in phases)] for r in data["records"]
    ]
    head = ["arm", "cards", "steps", "log-probabilities", "differ", "largest difference"]
    head += ["s a step", "tokens/GPU/s", "raw"]
    return "\n\n".join((
        "## The reference workload",
        "Qwen3-8B sizes, random weights, bf16: 1 prompt x 8 samples, responses of up to 7,168 tokens, KL coefficient "
        "0.001, seeds 1234, two engines, weights by CUDA IPC (`benchmarks/reference_workload.py`). "
        "All arms produce the first one's tokens again, so lengths are equal. `s a step` and `tokens/GPU/s` leave out "
        "the first step, `raw` has it in.",
        f"{origin(data)}{_other_commits(data)}",
        table(head, rows),
        "Seconds of each step, by phase:",
        table(["arm", *phases], by_phase),
    ))  # fmt: skip


def _other_commits(data: Data) -> str:
    """Which arms ran another commit than the last one's."""
    others: dict[str, list[str]] = {}
    for record in data["records"]:
        if record["commit"] != data["origin"]["commit"]:
            others.setdefault(record["commit"], []).append(record["arm"])
    return "".join(f" Of commit `{commit[:12]}`: {', '.join(names)}." for commit, names in others.items())


def _tokens_per_gpu_s(record: Data) -> float:
    """Of all steps, the first one too."""
    seconds = sum(sum(step.values()) for step in record["phases"])
    return float(sum(record["generated_tokens"]) / seconds / record["cards"])
