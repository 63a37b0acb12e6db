"""Work on weight gradients that waits until its owner wants it done, and is then done side by side.

The gradient of a QK-norm's weight is one chain over rows for each of a few columns: it takes long and keeps most of a
card idle. Those of different layers do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LIMIT = 32  # pieces of work that may wait: each keeps its inputs alive


class Later:
    """Work on the buffers of one owner, who calls `run` before he reads them or writes to them."""

    def __init__(self, device: torch.device) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(LIMIT)] if device.type == "cuda" else []
        self._device = device
        self._served: dict[int, int] = {}
        self._work: list[tuple[int, Callable[[], None]]] = []

    def serve(self, buffer: Tensor) -> None:
        """From now on, work on this buffer waits."""
        self._served[buffer.data_ptr()] = len(self._served)
        buffer.later = self  # type: ignore[attr-defined]

    def put(self, buffer: Tensor, work: Callable[[], None]) -> None:
        """Add work on a served buffer; what waits is done when it has become too much."""
        self._work.append((self._served[buffer.data_ptr()], work))
        if len(self._work) == LIMIT:
            self.run()

    def run(self) -> None:
        """Launch what waits: work on one buffer in order, on different ones side by side. The current stream waits."""
        work, self._work = self._work, []
        if not self._streams:
            for _, each in work:
                each()
            return
        current = torch.cuda.current_stream(self._device)
        streams = [self._streams[number % LIMIT] for number, _ in work]
        for stream in streams:
            stream.wait_stream(current)
        for stream, (_, each) in zip(streams, work, strict=True):
            with torch.cuda.stream(stream):
                each()
        for stream in streams:
            current.wait_stream(stream)

    def drop(self) -> None:
        """Forget what waits."""
        self._work = []


def when_due(buffer: Tensor, work: Callable[[], None]) -> None:
    """Do work that advances the weight gradient `buffer`: at once, or when its owner asks for it."""
    later: Later | None = getattr(buffer, "later", None)
    if later is None:
        work()
    else:
        later.put(buffer, work)
