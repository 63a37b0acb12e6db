"""What a vLLM wheel holds of the symbols that we use, read from its sources: nothing is installed or imported.

python -m samebits.into_vllm.wheel vllm-0.25.0-*.whl      # one JSON object per wheel

Exit code 1 where parser, server or engine arguments are in none of the places that `arguments` knows, 2 for no wheel.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

from samebits.into_vllm.arguments import ENGINE_PLACES, PARSER_PLACES, SERVER_PLACES
from samebits.into_vllm.patches import SYMBOLS
from samebits.into_vllm.wheel_symbols import lacking

# What the rollout engine hands to EngineArgs by name, on a CPU or a GPU.
ENGINE_FIELDS = (
    "additional_config",
    "attention_backend",
    "block_size",
    "compilation_config",
    "disable_custom_all_reduce",
    "disable_log_stats",
    "distributed_executor_backend",
    "dtype",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enforce_eager",
    "generation_config",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "load_format",
    "logits_processors",
    "logprobs_mode",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "model",
    "seed",
    "skip_tokenizer_init",
    "tensor_parallel_size",
    "worker_extension_cls",
)


def inspect_wheel(path: Path) -> dict[str, Any]:
    """Where the wheel keeps parser, server arguments and engine arguments ("" where nowhere that we look), whether
    each is a dataclass, which engine fields it lacks, and which symbols of `patches.SYMBOLS`. Raises ValueError for a
    file that is no vLLM wheel."""
    try:
        with zipfile.ZipFile(path) as wheel:
            names = set(wheel.namelist())
            version = _version(names)
            sources = {
                place: ast.parse(wheel.read(file))
                for place in (*PARSER_PLACES, *SERVER_PLACES, *ENGINE_PLACES)
                for file in _files(place)
                if file in names
            }
            symbols = lacking(wheel, SYMBOLS)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path}: no wheel: {error}") from error
    if version is None:
        raise ValueError(f"{path}: no vLLM wheel: it has no vllm*.dist-info")
    engine = _place("EngineArgs", ENGINE_PLACES, sources)
    fields = _fields("EngineArgs", sources[engine]) if engine else set()
    return {
        "version": version,
        "parser": _place("FlexibleArgumentParser", PARSER_PLACES, sources),
        "server": _place("make_arg_parser", SERVER_PLACES, sources),
        "server_is_dataclass": _is_dataclass("FrontendArgs", SERVER_PLACES, sources),
        "engine": engine,
        "engine_is_dataclass": _is_dataclass("AsyncEngineArgs", ENGINE_PLACES, sources),
        "engine_fields_missing": sorted(set(ENGINE_FIELDS) - fields),
        "symbols_missing": symbols,
    }


def is_served(facts: dict[str, Any]) -> bool:
    """Whether `arguments` finds its way in such a release."""
    return all(facts[name] for name in ("parser", "server", "engine"))


def _files(place: str) -> tuple[str, str]:
    stem = place.replace(".", "/")
    return f"{stem}.py", f"{stem}/__init__.py"


def _version(names: set[str]) -> str | None:
    infos = {name.split("/")[0] for name in names if name.startswith("vllm") and ".dist-info/" in name}
    return min(infos).removesuffix(".dist-info").partition("-")[2] if infos else None


def _place(name: str, places: tuple[str, ...], sources: dict[str, ast.Module]) -> str:
    return next((place for place in places if place in sources and _defined(name, sources[place])), "")


def _defined(name: str, module: ast.Module) -> ast.AST | None:
    """The definition or import of a name at the top of a module."""
    for node in module.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
            return node
    return None


def _is_dataclass(name: str, places: tuple[str, ...], sources: dict[str, ast.Module]) -> bool:
    place = _place(name, places, sources)
    node = _defined(name, sources[place]) if place else None
    # vLLM's own `config` decorator makes dataclasses, too
    return isinstance(node, ast.ClassDef) and any(
        ast.unparse(decorator).partition("(")[0] in ("dataclass", "config") for decorator in node.decorator_list
    )


def _fields(name: str, module: ast.Module) -> set[str]:
    node = _defined(name, module)
    assert isinstance(node, ast.ClassDef)
    return {
        line.target.id for line in node.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def main(words: list[str]) -> int:
    """Prints the facts of each wheel as one line of JSON; 1 when one has a layout that we don't know."""
    parser = argparse.ArgumentParser(prog="python -m samebits.into_vllm.wheel", description=__doc__)
    parser.add_argument("wheels", nargs="+", type=Path)
    try:
        facts = [inspect_wheel(path) for path in parser.parse_args(words).wheels]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for each in facts:
        print(json.dumps(each))
    return 0 if all(is_served(each) for each in facts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
