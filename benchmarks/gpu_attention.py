"""Attention beside FlashAttention 3 (vLLM's build) and torch's scaled_dot_product_attention, at Qwen3-8B's heads.

`python benchmarks/gpu_attention.py --commit HASH [--flash3 PATH]` on a machine with a GPU; PATH is the file
`vllm_flash_attn/_vllm_fa3_C.abi3.so` of a vLLM wheel. Without it the peer of the forward pass is torch's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from gpu_timing import eager_in_turn, in_turn, origin
from results import save
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from samebits.ops.attention import launch, paged_attention
from samebits.ops.attention import triton as own

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
SCALE = DIM**-0.5
BATCHES, CONTEXTS, LENGTHS = (1, 8, 32, 64), (1024, 4096, 16384, 32768), (1024, 2048, 4096, 8192)
ARITHMETIC = "sm90"


def flash3(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None, used: Tensor | None, most_q: int, most_k: int,
    table: Tensor | None,
) -> Tensor:  # fmt: skip
    """vLLM's FlashAttention 3 with its own heuristics (packed, or paged with `used` keys and a block table)."""
    nothing = [None] * 9
    out: Tensor = torch.ops._vllm_fa3_C.fwd(
        q, k, v, None, None, None, None, cu_q, cu_k, None, None, used, most_q, most_k, table, *nothing[:8], SCALE, True,
        -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None,
    )[0]  # fmt: skip
    return out


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def record(what: str, shape: str, peer: str, ours: float, theirs: float, **more: object) -> dict[str, object]:
    return {
        "what": what,
        "shape": shape,
        "peer": peer,
        "samebits_s": ours,
        "peer_s": theirs,
        "ratio": theirs / ours,
        **more,
    }


def decode(batch: int, context: int, peer: str) -> dict[str, object]:
    """One token of each of `batch` requests over `context` keys in shuffled pages."""
    pages = batch * context // PAGE
    table = torch.randperm(pages, device="cuda").int().view(batch, -1)
    cache, q = randn(pages, KV_HEADS, PAGE, 2 * DIM), randn(batch, HEADS, DIM)
    lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    functions: dict[str, Callable[[int], object]] = {
        "ours": lambda _: paged_attention(q, cache, table, lengths, starts, SCALE, max_query_len=1)
    }
    if peer == "FlashAttention 3":
        keys, values = cache[..., :DIM].transpose(1, 2).contiguous(), cache[..., DIM:].transpose(1, 2).contiguous()
        functions["theirs"] = lambda _: flash3(q, keys, values, starts, None, lengths, 1, context, table)
    else:
        order = table.long()
        keys, values = (
            cache[order][..., part].permute(0, 2, 1, 3, 4).reshape(batch, KV_HEADS, context, DIM).contiguous()
            for part in (slice(0, DIM), slice(DIM, None))
        )
        query = q[:, :, None]
        functions["theirs"] = lambda _: torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, enable_gqa=True
        )
    large = batch * context > 2**19
    times = in_turn(functions, calls=1 if large else 5, repeats=7 if large else 11)
    bytes_read = 2 * batch * context * KV_HEADS * DIM * 2
    return record(
        "decode", f"batch {batch}, context {context}", peer, times["ours"], times["theirs"], batch=batch,
        context=context, tb_per_s=bytes_read / times["ours"] / 1e12,
        launch=str(launch.split(batch, KV_HEADS, HEADS // KV_HEADS, -(-context // 512), copies=True)),
    )  # fmt: skip


def whole(tokens: int, peer: str) -> Iterator[dict[str, object]]:
    """Training forward and backward over one sequence, and prefill from pages."""
    operations = 4 * tokens * tokens * HEADS * DIM / 2
    q, k, v = randn(tokens, HEADS, DIM), randn(tokens, KV_HEADS, DIM), randn(tokens, KV_HEADS, DIM)
    cu = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    leaves = [x.transpose(0, 1)[None].contiguous().requires_grad_() for x in (q, k, v)]

    def torch_form(kind: SDPBackend) -> Tensor:
        with sdpa_kernel([kind]):
            return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    def train() -> tuple[Tensor, ...]:
        return own.forward(q, k, v, cu, cu, None, SCALE, True, ARITHMETIC)  # type: ignore[return-value]

    functions: dict[str, Callable[[int], object]] = {"ours": lambda _: train()}
    if peer == "FlashAttention 3":
        functions["theirs"] = lambda _: flash3(q, k, v, cu, cu, None, tokens, tokens, None)
    else:
        functions["theirs"] = lambda _: torch_form(SDPBackend.FLASH_ATTENTION)
    functions["cudnn"] = lambda _: torch_form(SDPBackend.CUDNN_ATTENTION).detach()
    times = in_turn(functions, calls=2, repeats=9)
    for name, key in ((peer, "theirs"), ("cuDNN", "cudnn")):
        yield record(
            "training forward", f"{tokens} tokens", name, times["ours"], times[key], tokens=tokens,
            tflops=operations / times["ours"] / 1e12, peer_tflops=operations / times[key] / 1e12,
        )  # fmt: skip
    yield prefill(q, k, v, tokens, peer, operations)
    out, m, lsum = train()
    dout = randn(tokens, HEADS, DIM)
    upstream = dout.transpose(0, 1)[None].contiguous()
    steps: dict[str, Callable[[], object]] = {
        "ours": lambda: own.backward(dout, q, k, v, out, m, lsum, cu, cu, None, SCALE, ARITHMETIC)
    }
    for name, kind in (("torch's flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        result = torch_form(kind)
        steps[name] = lambda result=result: torch.autograd.grad(result, leaves, upstream, retain_graph=True)
    times = eager_in_turn(steps, repeats=9)
    for name in ("torch's flash", "cuDNN"):
        yield record(
            "backward", f"{tokens} tokens", name, times["ours"], times[name], tokens=tokens,
            tflops=2.5 * operations / times["ours"] / 1e12, peer_tflops=2.5 * operations / times[name] / 1e12,
        )  # fmt: skip


def prefill(q: Tensor, k: Tensor, v: Tensor, tokens: int, peer: str, operations: float) -> dict[str, object]:
    """All tokens of one request, keys in shuffled pages."""
    pages = tokens // PAGE
    table = torch.randperm(pages, device="cuda").int().view(1, -1)
    cache = torch.empty(pages, KV_HEADS, PAGE, 2 * DIM, device="cuda", dtype=torch.bfloat16)
    at = torch.arange(tokens, device="cuda")
    own.write_kv(k, v, cache, table[0, at // PAGE].long() * PAGE + at % PAGE)
    lengths = torch.tensor([tokens], device="cuda", dtype=torch.int32)
    starts = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    functions: dict[str, Callable[[int], object]] = {
        "ours": lambda _: paged_attention(q, cache, table, lengths, starts, SCALE)
    }
    if peer == "FlashAttention 3":
        keys, values = cache[..., :DIM].transpose(1, 2).contiguous(), cache[..., DIM:].transpose(1, 2).contiguous()
        functions["theirs"] = lambda _: flash3(q, keys, values, starts, None, lengths, tokens, tokens, table)
    else:
        functions["theirs"] = lambda _: own.forward(q, k, v, starts, starts, None, SCALE, False, ARITHMETIC)
    times = in_turn(functions, calls=2, repeats=7)
    return record(
        "prefill from pages", f"{tokens} tokens", peer if peer == "FlashAttention 3" else "our packed form",
        times["ours"], times["theirs"], tokens=tokens, tflops=operations / times["ours"] / 1e12,
        peer_tflops=operations / times["theirs"] / 1e12,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--flash3")
    arguments = parser.parse_args()
    peer = "torch's flash"
    if arguments.flash3:
        torch.ops.load_library(arguments.flash3)
        peer = "FlashAttention 3"
    torch.manual_seed(0)
    records = [decode(batch, context, peer) for batch in BATCHES for context in CONTEXTS]
    for tokens in LENGTHS:
        records += whole(tokens, peer)
    save("gpu_attention", {"origin": origin(arguments.commit), "records": records})
    for r in records:
        print(r["what"], r["shape"], r["peer"], f"{r['samebits_s']:.3g} s", f"ratio {r['ratio']:.2f}", sep=", ")


if __name__ == "__main__":
    main()
