"""The source of a model's forward code: which functions run, in which file, at which line.

Only people's own code is read: torch, and the libraries that models are wrapped by, are left out.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import nn

from ctj_trainer.hooks.effects import unwrapped

_LIBRARIES = ("torch", "accelerate", "deepspeed", "ctj_trainer.hooks", "ctj_trainer.strategies")
_DEPTH = 4  # forward, its helpers, and theirs


@dataclass(frozen=True, kw_only=True)
class Source:
    """One function's code, with line numbers of its file."""

    subject: str
    """Names of the modules that run it (`blocks.0 and 11 more`), or the script."""
    file: str
    node: ast.FunctionDef | ast.Module
    count: int = 1
    """How many modules of the model run it."""
    tensors: frozenset[str] = frozenset()
    """Names of parameters and buffers of its module (`self.NAME` is a tensor)."""

    def at(self, node: ast.AST) -> str:
        """Return `file:line` of a node."""
        return f"{_short(self.file)}:{getattr(node, 'lineno', 1)}"

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Each node's parent."""
        return {child: parent for parent in ast.walk(self.node) for child in ast.iter_child_nodes(parent)}

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Return what a node stands in, innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node


def forward_sources(model: nn.Module) -> list[Source]:
    """Return the forward of each class of the model, with the methods and functions that it calls by name."""
    found: dict[Any, Source] = {}
    for kind, names in _modules_by_class(model).items():
        if _is_library(kind.__module__):
            continue
        subject = names[0] or "the model"
        if len(names) > 1:
            subject += f" and {len(names) - 1} more"
        module = model.get_submodule(names[0])
        tensors = frozenset(
            name for name, _ in [*module.named_parameters(), *module.named_buffers()] if "." not in name
        )
        for function in _called(kind, inspect.getattr_static(kind, "forward"), _DEPTH):
            node = None if function.__code__ in found else _parsed(function)
            if node is not None:
                file = function.__code__.co_filename
                found[function.__code__] = Source(
                    subject=subject, file=file, node=node, count=len(names), tensors=tensors
                )
    return list(found.values())


def script_source(path: Path) -> Source:
    """Return a whole script.

    Raises:
        SyntaxError: it is no Python.
    """
    return Source(subject=path.name, file=str(path), node=ast.parse(path.read_text(encoding="utf-8")))


def functions_in(source: Source) -> Iterator[Source]:
    """Return the functions of a script that are methods named forward, as sources of their own."""
    for node in ast.walk(source.node):
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "forward":
                    yield Source(subject=node.name, file=source.file, node=item)


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` of a name or attribute; calls and subscripts inside become `()` and `[]`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{dotted(node.func)}()"
    if isinstance(node, ast.Subscript):
        return f"{dotted(node.value)}[]"
    return ""


def calls(node: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Return each call below a node with its dotted name, in the order of lines."""
    found = [child for child in ast.walk(node) if isinstance(child, ast.Call)]
    yield from ((dotted(call.func), call) for call in sorted(found, key=lambda c: (c.lineno, c.col_offset)))


def text(node: ast.AST, *, limit: int = 120) -> str:
    """Return a node's code on one line."""
    line = " ".join(ast.unparse(node).split())
    return line if len(line) <= limit else f"{line[:limit]}..."


def _modules_by_class(model: nn.Module) -> dict[type, list[str]]:
    classes: dict[type, list[str]] = {}
    for name, module in model.named_modules():
        classes.setdefault(type(module), []).append(name)
    return classes


def _called(kind: type, function: Any, depth: int) -> Iterator[FunctionType]:
    plain = unwrapped(function)
    if depth == 0 or not isinstance(plain, FunctionType) or _is_library(plain.__module__):
        return
    yield plain
    for name in plain.__code__.co_names:
        for candidate in (plain.__globals__.get(name), inspect.getattr_static(kind, name, None)):
            if isinstance(unwrapped(candidate), FunctionType) and unwrapped(candidate) is not plain:
                yield from _called(kind, candidate, depth - 1)


def _parsed(function: FunctionType) -> ast.FunctionDef | None:
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # made at run time, or a lambda inside an expression
        return None
    ast.increment_lineno(tree, first - 1)
    node = tree.body[0]
    return node if isinstance(node, ast.FunctionDef) else None


def _is_library(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _LIBRARIES)


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
