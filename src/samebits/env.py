"""The only reader of the process environment. Every name that samebits looks at is in this table.

`read("SAMEBITS_DEBUG")` returns the parsed value or its default; a value that does not parse raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One environment variable: how to parse it, its default, what it means, whether it may move bits."""

    name: str
    parse: Callable[[str], object]
    default: object
    meaning: str
    changes_bits: bool = False


def _level(text: str) -> int:
    level = int(text)
    if not 0 <= level <= 5:
        raise ValueError("want 0 to 5")
    return level


VARIABLES: dict[str, Variable] = {
    variable.name: variable
    for variable in (
        Variable(
            name="SAMEBITS_DEBUG",
            parse=_level,
            default=0,
            meaning="0 quiet, 1 backend per op, 2 shapes and time, 3 launch, 4 code path, 5 digests per call",
        ),
        Variable(
            name="SAMEBITS_VLLM_PLAN",
            parse=str,
            default="",
            meaning="route plan (JSON) of the vLLM plugin; set by the rollout engine for the processes it starts",
            changes_bits=True,
        ),
        Variable(
            name="CUDA_VISIBLE_DEVICES",
            parse=str,
            default="",
            meaning="cards that a process sees; the rollout engine puts its own first for the processes it starts",
        ),
        Variable(
            name="CUBLAS_WORKSPACE_CONFIG",
            parse=str,
            default="",
            meaning="scratch memory of cuBLAS; recorded in certificates of its products",
        ),
        Variable(
            name="CUBLASLT_WORKSPACE_SIZE",
            parse=str,
            default="",
            meaning="scratch memory of cuBLASLt; recorded in certificates of its products",
        ),
    )
}


def read(name: str) -> object:
    """The parsed value of one listed variable, or its default when it is unset or empty.

    Raises ValueError for a name that is not in the table and for a value that does not parse.
    """
    if name not in VARIABLES:
        raise ValueError(f"environment variable {name!r} is not listed in samebits.env: add it to VARIABLES")
    variable = VARIABLES[name]
    text = os.environ.get(name, "")
    if not text:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ValueError(f"environment variable {name}={text!r} is not valid: {error}") from error


def export(values: Mapping[str, str]) -> None:
    """Set variables for libraries that are configured by them, in this process and in those that it starts."""
    os.environ.update(values)
