"""How often a routed layer was called."""

from __future__ import annotations

import torch


class Calls:
    """Calls that computed, and apart from them those that a graph captured: such a call launches nothing, its kernels
    run whenever the graph is replayed."""

    __slots__ = ("captured", "computed")

    def __init__(self) -> None:
        self.computed = 0
        self.captured = 0

    def note(self) -> None:
        """One more call, by whatever the current stream is doing."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self.captured += 1
        else:
            self.computed += 1
