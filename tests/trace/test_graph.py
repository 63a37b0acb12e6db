"""Recording inside a captured CUDA graph: the ops write into fixed buffers, which are read after each replay."""

from __future__ import annotations

import pytest
import torch

from samebits.trace import Point, Recorder, Rows, Token, assemble, row_digests

POINT = Point(3, "ffn_out")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a CUDA device")
def test_a_replayed_graph_records_what_it_computed() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(64, 512, generator=generator).bfloat16() for _ in range(4)]
    chosen = [torch.randperm(64, generator=generator)[:count] for count in (16, 3, 9, 0)]
    weight = torch.randn(512, 512, generator=generator).bfloat16().cuda()
    x = torch.zeros_like(batches[0], device="cuda")
    recorder = Recorder(keep=[POINT], capacity=16, device="cuda")
    recorder.place(rows(chosen[0]))

    def compute() -> torch.Tensor:
        y = x @ weight
        recorder.note(POINT, y)
        return y

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compute()
    recorder.take()
    for batch, picked in zip(batches, chosen, strict=True):
        x.copy_(batch)
        recorder.place(rows(picked))
        graph.replay()
        recorder.collect()
        found = assemble([recorder.take()])
        wanted = row_digests(y).cpu().tolist()
        assert found.digests.get(POINT, {}) == {Token(0, int(row)): wanted[row] % (1 << 64) for row in picked}
        for row in picked.tolist():
            assert (found.rows[POINT][Token(0, row)] == y[row].view(torch.int16).cpu().numpy()).all()


def rows(picked: torch.Tensor) -> Rows:
    return Rows(picked, torch.zeros_like(picked), picked)
