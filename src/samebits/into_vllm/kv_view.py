"""What attention reads: the keys and values that lie in a request's pages, not those that were computed for them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context

from samebits.trace import Recorder, Rows


def note_keys_and_values(recorder: Recorder, layer: int, attention: Any, rank: int, ranks: int) -> None:
    """Records points `keys` and `values` of every traced row: for each, all keys from position 0 up to its own.

    `attention` is vLLM's attention layer, whose cache is read after this pass wrote to it.
    """
    described: Any = get_forward_context().attn_metadata
    paged = described[attention.layer_name]
    rows = recorder.rows()
    starts, lengths = paged.query_start_loc.tolist(), paged.seq_lens.tolist()
    for at, length in enumerate(lengths):
        mine = (rows.row >= starts[at]) & (rows.row < starts[at + 1])
        if not bool(mine.any()):
            continue
        traced = Rows(rows.row[mine], rows.sequence[mine], rows.index[mine])
        for name, held in zip(
            ("keys", "values"), _read(attention.kv_cache, paged.block_table[at], length), strict=True
        ):
            width = held.shape[1]
            recorder.note_prefixes(layer, name, held, traced, start=rank * width, whole=ranks * width)


def _read(cache: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values [length, heads * head_dim] of the first `length` positions of one request."""
    size, half = cache.shape[2], cache.shape[3] // 2
    pages = cache[table[: -(-length // size)].long()]
    tokens = pages.permute(0, 2, 1, 3).reshape(-1, cache.shape[1], 2 * half)[:length]
    return tokens[..., :half].reshape(length, -1), tokens[..., half:].reshape(length, -1)
