"""Whether a vLLM wheel has the symbols that the integration relies on, read from its sources alone.

The same question that `patching.census` asks of an installed package. A name is followed through imports, a
method through base classes; what the sources can't tell (names made at run time) counts as missing.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterable, Iterator
from functools import lru_cache

from samebits.patching import Symbol

_DEPTH = 8  # imports and base classes followed from one name


class WheelSources:
    """The modules of one wheel as syntax trees, parsed when they're asked for."""

    def __init__(self, wheel: zipfile.ZipFile) -> None:
        self._wheel = wheel
        self._names = frozenset(wheel.namelist())
        self.module = lru_cache(maxsize=None)(self._module)

    def _module(self, name: str) -> ast.Module | None:
        stem = name.replace(".", "/")
        for file in (f"{stem}.py", f"{stem}/__init__.py"):
            if file in self._names:
                return ast.parse(self._wheel.read(file))
        return None

    def find(self, module: str, name: str, depth: int = _DEPTH) -> tuple[str, ast.AST] | None:
        """(module that defines it, its node) of a top-level name; None where the sources don't define it."""
        tree = self.module(module)
        if tree is None or depth == 0:
            return None
        for node in _top_level(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._imported(module, node, alias.name, depth)
                    if alias.name == "*":
                        found = self._imported(module, node, name, depth)
                        if found is not None:
                            return found
        return None

    def _imported(self, module: str, node: ast.ImportFrom, name: str, depth: int) -> tuple[str, ast.AST] | None:
        source = node.module or ""
        if node.level:
            package = module if self._is_package(module) else module.rpartition(".")[0]
            for _ in range(node.level - 1):
                package = package.rpartition(".")[0]
            source = f"{package}.{source}".rstrip(".")
        if not source.startswith("vllm"):
            return source, node  # another distribution's: taken as it is
        return self.find(source, name, depth - 1)

    def _is_package(self, module: str) -> bool:
        return f"{module.replace('.', '/')}/__init__.py" in self._names

    def member(self, module: str, owner: ast.ClassDef, name: str, depth: int = _DEPTH) -> ast.AST | None:
        """A class's attribute: in its body, set on self, or in a base class."""
        for node in ast.walk(owner):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                return node
        for base in owner.bases:
            outer = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(outer, ast.Name) and depth:
                found = self.find(module, outer.id)
                if found is not None and isinstance(found[1], ast.ClassDef):
                    inherited = self.member(found[0], found[1], name, depth - 1)
                    if inherited is not None:
                        return inherited
        return None


def lacking(wheel: zipfile.ZipFile, symbols: Iterable[Symbol]) -> list[str]:
    """One line per symbol that the wheel lacks or whose parameters start otherwise."""
    sources = WheelSources(wheel)
    return [problem for symbol in symbols if (problem := _problem(sources, symbol)) is not None]


def _problem(sources: WheelSources, symbol: Symbol) -> str | None:
    module, _, attributes = symbol.path.partition(":")
    first, *rest = attributes.split(".")
    found = sources.find(module, first)
    if found is None:
        return f"{symbol.path}: {first!r} is not in {module}"
    where, node = found
    for name in rest:
        inner = sources.member(where, node, name) if isinstance(node, ast.ClassDef) else None
        if inner is None:
            return f"{symbol.path}: {name!r} is not in {first}"
        node = inner
    return _wrong_parameters(sources, symbol, where, node)


def _wrong_parameters(sources: WheelSources, symbol: Symbol, where: str, node: ast.AST) -> str | None:
    if symbol.parameters is None:
        return None
    if isinstance(node, ast.ClassDef):  # calling a class calls its __init__, without self
        init = sources.member(where, node, "__init__")
        names = _parameters(init)[1:]
    else:
        names = _parameters(node)
    wanted = list(symbol.parameters)
    if "staticmethod" not in _decorators(node) and "classmethod" in _decorators(node):
        names = names[1:]
    return None if names[: len(wanted)] == wanted else f"{symbol.path}: parameters are {', '.join(names)}"


def _parameters(node: ast.AST | None) -> list[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    given = node.args
    return [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def _decorators(node: ast.AST) -> set[str]:
    return {ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ())}


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a module, those under `if` and `try` included."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop(0)
        yield node
        if isinstance(node, ast.If):
            pending += [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            pending += [*node.body, *node.orelse, *(line for handler in node.handlers for line in handler.body)]


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return names | {target.attr for target in targets if isinstance(target, ast.Attribute)}
