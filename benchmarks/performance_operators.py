"""Sections of docs/performance.md about one operator each. A section is a function from a record to Markdown."""

from __future__ import annotations

from performance_tables import Data, geometric_mean, origin, table


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
