"""Render docs/performance.md from the records in benchmarks/results: `python benchmarks/render_performance.py`.

A section is a function from a file's content to Markdown, listed in SECTIONS under the file's name; a file that does
not exist leaves its section out. Sections about operators, and about engines, lie in the files of these names.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from performance_engines import reference_workload, throughput, throughput_profile, training
from performance_operators import attention, elementwise, linear, logprob, norm_launches
from performance_tables import Data, origin, table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/performance.md"
HEAD = """# Performance

Side by side on one card, medians of repeats that take turns; raw records are in `benchmarks/results/`. A ratio is the
peer's time over ours: above 1 we are faster. This page is written by `benchmarks/render_performance.py`.
"""


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
    "reference_workload": reference_workload,
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
