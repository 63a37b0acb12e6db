"""What stays outside of the pieces when vLLM captures a batch as a row of graphs with attention between them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

# vLLM's capture that ends a graph before an attention call and begins the next one behind it, without its compiler.
PLACE = "vllm.compilation.breakable_cudagraph"
SWITCH = "VLLM_USE_BREAKABLE_CUDAGRAPH"

Function = TypeVar("Function", bound=Callable[..., Any])


def are_there() -> bool:
    """Whether the installed vLLM can capture pieces without its compiler."""
    return find_spec(PLACE) is not None


def outside_of_pieces(function: Function) -> Function:
    """`function`, which writes into a tensor that it is given, called again at every replay of a row of graphs.

    It is part of a graph that holds a whole batch, and called as ever where nothing is captured.
    """
    if not are_there():
        return function
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    outside: Function = eager_break_during_capture(function)
    return outside
