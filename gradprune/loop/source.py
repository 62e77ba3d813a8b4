"""From a function to its syntax tree, at its own line numbers, and from a changed tree back to a function.

The new function shares everything with the old one but its code: globals, closure cells, defaults, annotations and
attributes. Its code comes from the same file and the same lines, so that tracebacks, debuggers and coverage agree.
"""

from __future__ import annotations
import __future__

import ast
import linecache
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

from gradprune.errors import PruneError
from gradprune.facts import SourceLine
from gradprune.frames import source_line

Function = ast.FunctionDef | ast.AsyncFunctionDef

#: The one ``from __future__ import`` that still changes what code means.
_FUTURE = __future__.annotations.compiler_flag


class LoopRefusal(PruneError):
    """A function that `grpo_loop` leaves as it is; `where` is the line that it does not understand."""

    def __init__(self, message: str, where: SourceLine | None) -> None:
        super().__init__(message)
        self.where = where


@dataclass(frozen=True)
class Source:
    """A function's definition. classes: the classes around it, outermost first: private names depend on them."""

    function: FunctionType
    tree: Function
    classes: tuple[str, ...]

    def line(self, node: ast.AST) -> SourceLine:
        """Where a node stands, with its text."""
        code = self.function.__code__
        return source_line(code.co_filename, getattr(node, "lineno", code.co_firstlineno), code.co_name)

    def names(self) -> set[str]:
        """Every name in the definition."""
        names = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        return names | {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.arg)}

    def fresh(self, name: str) -> str:
        """`name`, or its like that the definition does not use."""
        taken = self.names()
        while name in taken:
            name += "_"
        return name


def read_source(function: Any) -> Source:
    """Parse the definition of `function`. Raises LoopRefusal for what has none, naming what it is instead."""
    if not isinstance(function, FunctionType):
        raise LoopRefusal(f"{function!r} is a {type(function).__name__}: decorate a function that is made by def", None)
    code = function.__code__
    place = source_line(code.co_filename, code.co_firstlineno, code.co_name)
    if hasattr(function, "__wrapped__"):
        raise LoopRefusal(
            f"{function.__name__} is wrapped by another decorator: put @gradprune.grpo_loop next to the def, below it",
            place,
        )
    if code.co_name == "<lambda>":
        raise LoopRefusal("a lambda holds no loop: decorate a function that is made by def", place)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines:
        raise LoopRefusal(f"the source of {function.__name__} is not to be found: decorate it in its own file", place)
    try:
        module = ast.parse("".join(lines))
    except SyntaxError as error:
        raise LoopRefusal(f"{code.co_filename} no longer parses: {error}", place) from error
    for tree, classes in _definitions(module, ()):
        first = min([tree.lineno, *(decorator.lineno for decorator in tree.decorator_list)])
        if tree.name == code.co_name and first == code.co_firstlineno:
            return Source(function, tree, classes)
    raise LoopRefusal(f"{function.__name__} is not at this line of its file: has the file changed since?", place)


def _definitions(node: ast.AST, classes: tuple[str, ...]) -> Iterator[tuple[Function, tuple[str, ...]]]:
    for child in ast.iter_child_nodes(node):
        inside = classes
        if isinstance(child, Function):
            yield child, classes
        elif isinstance(child, ast.ClassDef):
            inside = (*classes, child.name)
        yield from _definitions(child, inside)


def build_function(source: Source, tree: Function, extra: Mapping[str, Any]) -> FunctionType:
    """A function like `source.function` with the body of `tree`; `extra` are further names that it may read."""
    old = source.function
    cells = dict(zip(old.__code__.co_freevars, old.__closure__ or ()))
    cells.update((name, CellType(value)) for name, value in extra.items())
    code = _compile(source, tree, list(cells))
    new = FunctionType(
        code, old.__globals__, old.__name__, old.__defaults__, tuple(cells[name] for name in code.co_freevars)
    )
    new.__kwdefaults__ = old.__kwdefaults__
    new.__annotations__ = old.__annotations__
    new.__qualname__, new.__module__, new.__doc__ = old.__qualname__, old.__module__, old.__doc__
    new.__dict__.update(old.__dict__)
    return new


def _compile(source: Source, tree: Function, free: list[str]) -> CodeType:
    """The code of `tree` where `free` are variables of an enclosing function. The enclosing code never runs."""
    original = source.function.__code__
    body: list[ast.stmt] = [tree]
    for name in reversed(source.classes):
        body = [_enclosing(f"class {name}: pass", body)]
    body = [_enclosing(f"def enclosing({', '.join(free)}): pass", body)]
    module = ast.fix_missing_locations(ast.Module(body=body, type_ignores=[]))
    flags = original.co_flags & _FUTURE
    code = compile(module, original.co_filename, "exec", flags=flags, dont_inherit=True)
    found = next(
        inner
        for inner in _codes(code)
        if inner.co_name == original.co_name and inner.co_firstlineno == original.co_firstlineno
    )
    return found.replace(co_qualname=original.co_qualname) if hasattr(original, "co_qualname") else found


def _enclosing(header: str, body: list[ast.stmt]) -> ast.stmt:
    statement: Any = ast.parse(header).body[0]
    statement.body = body
    return statement


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
