"""vLLM's server command line, wherever the installed release keeps it: its fields, and values forwarded to it.

Features are probed, versions are not read. `python -m samebits.into_vllm.wheel FILE...` says which of these places a
wheel has, without installing it.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

# Where releases keep a name: the current place first.
PARSER_PLACES = ("vllm.utils.argparse_utils", "vllm.utils")
SERVER_PLACES = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)
ENGINE_PLACES = ("vllm.engine.arg_utils",)


class LayoutUnknown(RuntimeError):
    """The installed vLLM keeps a part of its command line in no place that we know."""


def find(name: str, places: tuple[str, ...]) -> Any:
    """`name` from the first of `places` that has it.

    Raises LayoutUnknown when none has. An error inside a module that exists comes out as it is.
    """
    for place in places:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            # absent itself, or a package above it; anything else that is missing is that release's own trouble
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise
            continue
        if hasattr(module, name):
            return getattr(module, name)
    raise LayoutUnknown(f"vLLM has no {name} in {' or '.join(places)}; this release is laid out in a new way")


def parser_class() -> type[argparse.ArgumentParser]:
    """vLLM's FlexibleArgumentParser."""
    found: type[argparse.ArgumentParser] = find("FlexibleArgumentParser", PARSER_PLACES)
    return found


def server_parser() -> argparse.ArgumentParser:
    """The live parser of `vllm serve`, with every flag of server and engine."""
    parser: argparse.ArgumentParser = find("make_arg_parser", SERVER_PLACES)(parser_class()())
    return parser


def server_fields() -> frozenset[str]:
    """The names that the server accepts: fields of its dataclasses, or of its live parser where it has none."""
    try:
        sources = find("FrontendArgs", SERVER_PLACES), find("AsyncEngineArgs", ENGINE_PLACES)
    except LayoutUnknown:
        return fields_of(server_parser())
    if not all(is_dataclass(source) for source in sources):
        return fields_of(server_parser())
    return frozenset(field.name for source in sources for field in fields(source))


def fields_of(parser: argparse.ArgumentParser) -> frozenset[str]:
    """The names under which a parser stores values. An action may carry anything as `dest`; only strings are names."""
    return frozenset(
        action.dest
        for action in parser._actions
        if isinstance(action.dest, str) and action.dest not in (argparse.SUPPRESS, "help")
    )


def forward(given: Mapping[str, object], parser: argparse.ArgumentParser, prefix: str = "vllm_") -> list[str]:
    """The command line for values that a user gave as `prefix` + field.

    Text goes through verbatim, so a flag that vLLM turns into a dataclass (JSON) arrives as it was written. None is
    left out, a truth value becomes the flag or its negation, a list several words. Other names are left alone. Raises
    ValueError for a field that the parser lacks, TypeError for a value that has no textual form of its own.
    """
    words: list[str] = []
    actions = {action.dest: action for action in parser._actions if isinstance(action.dest, str)}
    for name, value in given.items():
        if not name.startswith(prefix) or value is None:
            continue
        field = name.removeprefix(prefix)
        if field not in actions or not actions[field].option_strings:
            close = difflib.get_close_matches(field, actions, n=1, cutoff=0.5)
            hint = f"; did you mean {prefix}{close[0]}?" if close else ""
            raise ValueError(f"{name}: the installed vLLM has no flag for {field!r}{hint}")
        words += _words(name, value, actions[field])
    return words


def _words(name: str, value: object, action: argparse.Action) -> list[str]:
    flags = [flag for flag in action.option_strings if flag.startswith("--")]
    if isinstance(value, bool):
        if action.nargs != 0:
            return [f"{flags[0]}={str(value).lower()}"]
        wanted = [flag for flag in flags if flag.startswith("--no-") is not value]
        return wanted[:1]  # a flag without a negation is off when it is left out
    if isinstance(value, (list, tuple)):
        return [flags[0], *(_text(name, item) for item in value)]
    # one word, so that text that begins with a dash is no flag
    return [f"{flags[0]}={_text(name, value)}"]


def _text(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(value)
    raise TypeError(
        f"{name}: give the text that the flag takes (JSON for a structured one), got {type(value).__name__}"
    )
