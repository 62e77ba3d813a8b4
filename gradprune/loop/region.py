"""Find the loop over microbatches in a function, and in its body the region from the forward to the backward.

A region starts after the last statement that binds or changes a factor, and ends with the statement that calls
backward.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gradprune.loop.names import blocks_of, bound_names, changed_names, read_names, walk_here
from gradprune.loop.source import LoopRefusal, Source

Loop = ast.For | ast.AsyncFor | ast.While
Path = tuple[tuple[ast.AST, str], ...]

_BACKWARD = ("backward", "manual_backward")
_SUSPENDS = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
#: What a statement may consist of that computes nothing: it is left out at the start of a region.
_IDLE = (
    *(ast.Pass, ast.Assign, ast.AugAssign, ast.Expr, ast.Name, ast.Constant, ast.Global, ast.Nonlocal),
    *(ast.expr_context, ast.operator),
)


@dataclass(frozen=True)
class Region:
    """``block[start:stop]`` of the body of `loop`, with the one backward (or one a branch) in its last statement."""

    loop: Loop
    block: list[ast.stmt]
    start: int
    stop: int
    calls: tuple[ast.Call, ...]

    @property
    def statements(self) -> list[ast.stmt]:
        return self.block[self.start : self.stop]

    @property
    def target_names(self) -> list[str]:
        """Names that the loop's head binds to what it iterates over."""
        return [] if isinstance(self.loop, ast.While) else sorted(bound_names([self.loop.target]))


def find_region(source: Source, roots: frozenset[str]) -> Region:
    """The region of the function's one loop over microbatches. roots: names in the factors.

    Raises LoopRefusal that names the construct and the line that are not understood.
    """
    loop, calls = _choose_loop(source, roots)
    _check_single(source, loop, calls)
    _check_roots(source, loop, roots)
    block, start, stop = _locate(source, loop, calls, roots)
    region = Region(loop, block, start, stop, tuple(calls))
    _check_suspensions(source, region, roots)
    return region


# Which loop --------------------------------------------------------------------------------------------------------


def _choose_loop(source: Source, roots: frozenset[str]) -> tuple[Loop, list[ast.Call]]:
    found = _loops(source.tree)
    if not found:
        raise _no_loop(source)
    if len(found) > 1:
        found = [item for item in found if _binds(item[0]) & roots] or found
    if len(found) > 1:
        lines = " and ".join(str(loop.lineno) for loop, _ in found)
        raise LoopRefusal(
            f"{source.tree.name} has {len(found)} loops that call backward, at lines {lines}: let zero name what only "
            "one of them binds, or give the other one a function of its own",
            source.line(found[-1][0]),
        )
    return found[0]


def _binds(loop: Loop) -> set[str]:
    return bound_names([*([] if isinstance(loop, ast.While) else [loop.target]), *loop.body])


def _loops(function: ast.AST) -> list[tuple[Loop, list[ast.Call]]]:
    """The loops whose own body calls backward, with those calls."""
    found: dict[Loop, list[ast.Call]] = {}
    for loop, node in _with_loop(function, None):
        if loop is not None and _is_backward(node):
            found.setdefault(loop, []).append(node)  # type: ignore[arg-type]
    return list(found.items())


def _with_loop(node: ast.AST, loop: Loop | None) -> Iterator[tuple[Loop | None, ast.AST]]:
    """Every node of this function with the loop in whose body it is, innermost."""
    for field, child in _children(node):
        inner = node if isinstance(node, Loop) and field == "body" else loop
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield inner, child
            yield from _with_loop(child, inner)


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for field, value in ast.iter_fields(node):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield field, item


def _is_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _BACKWARD


def _no_loop(source: Source) -> LoopRefusal:
    name = source.tree.name
    here = [node for node in walk_here(source.tree) if _is_backward(node)]
    anywhere = [node for node in ast.walk(source.tree) if _is_backward(node)]
    if here:
        return LoopRefusal(f"{name} calls backward, but in no loop: there is one microbatch", source.line(here[0]))
    if anywhere:
        message = f"{name} calls backward in a nested function: call it in the body of the loop"
        return LoopRefusal(message, source.line(anywhere[0]))
    loops = [node for node in walk_here(source.tree) if isinstance(node, Loop)]
    if loops:
        message = f"no loop of {name} calls backward: if a function that it calls does, call it in the loop instead"
        return LoopRefusal(message, source.line(loops[0]))
    return LoopRefusal(
        f"{name} has no loop: decorate the function that loops over microbatches", source.line(source.tree)
    )


# Which backward ----------------------------------------------------------------------------------------------------


def _check_single(source: Source, loop: Loop, calls: Sequence[ast.Call]) -> None:
    paths = [_path(loop, call) for call in calls]
    for call, path in zip(calls, paths):
        if any(isinstance(node, _COMPREHENSIONS) for node, _ in path):
            raise LoopRefusal("a comprehension calls backward: write it as a loop", source.line(call))
    for index, first in enumerate(paths):
        for second, call in zip(paths[index + 1 :], calls[index + 1 :]):
            if not _exclusive(first, second):
                raise LoopRefusal(
                    f"the loop at line {loop.lineno} calls backward at line {calls[index].lineno} and again: one loss "
                    "a microbatch is understood; add the losses, or decorate a function with a loop for each",
                    source.line(call),
                )


def _path(top: ast.AST, target: ast.AST) -> Path:
    """The nodes from `top` down to `target`, each with the field that leads on; empty if it is not inside."""
    for field, child in _children(top):
        if child is target:
            return ((top, field),)
        below = _path(child, target)
        if below:
            return ((top, field), *below)
    return ()


def _exclusive(first: Path, second: Path) -> bool:
    """Whether two nodes stand in branches of which only one runs."""
    for (node, field), (other, other_field) in zip(first, second):
        if node is not other:
            return isinstance(node, ast.match_case) and isinstance(other, ast.match_case)
        if field != other_field:
            return isinstance(node, ast.If | ast.IfExp) and {field, other_field} == {"body", "orelse"}
    return False


def _check_roots(source: Source, loop: Loop, roots: frozenset[str]) -> None:
    code = source.function.__code__
    known = {*code.co_varnames, *code.co_cellvars, *code.co_freevars, *source.function.__globals__}
    for name in sorted(roots - known - bound_names(source.tree.body)):
        raise LoopRefusal(
            f"zero names {name!r}, which neither {source.tree.name} nor its module binds: name tensors that the body "
            "of this loop reads",
            source.line(loop),
        )


# Where the region is -----------------------------------------------------------------------------------------------


def _locate(
    source: Source, loop: Loop, calls: Sequence[ast.Call], roots: frozenset[str]
) -> tuple[list[ast.stmt], int, int]:
    block = loop.body
    while True:
        index = next(i for i, statement in enumerate(block) if _holds(statement, calls[0]))
        statement = block[index]
        start = 1 + max((i for i in range(index) if _is_barrier(block[i], roots)), default=-1)
        while start < index and _is_idle(block[start]):
            start += 1
        obstacle = _obstacle(statement, calls, roots)
        inner = [part for part in blocks_of(statement) if all(any(_holds(s, call) for s in part) for call in calls)]
        if obstacle is None and (start < index or not inner):
            return block, start, index + 1
        if not inner:
            assert obstacle is not None
            line = source.line(obstacle)
            raise LoopRefusal(
                f"line {line.line} stands in the statement that calls backward at line {calls[0].lineno}, and "
                "yields, waits, steps an optimizer or changes what zero names: move it out of there",
                line,
            )
        block = inner[0]


def _holds(statement: ast.AST, call: ast.AST) -> bool:
    return any(node is call for node in walk_here(statement))


def _is_barrier(part: ast.AST, roots: frozenset[str]) -> bool:
    """Whether the region must start after this: it suspends, steps an optimizer, or is needed to decide."""
    return bool(changed_names(part) & roots) or any(_suspends(node) or _steps(node) for node in walk_here(part))


def _suspends(node: ast.AST) -> bool:
    return isinstance(node, _SUSPENDS) or (isinstance(node, ast.comprehension) and bool(node.is_async))


def _steps(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"


def _is_idle(statement: ast.stmt) -> bool:
    return all(isinstance(node, _IDLE) for node in ast.walk(statement))


def _obstacle(statement: ast.stmt, calls: Sequence[ast.Call], roots: frozenset[str]) -> ast.AST | None:
    """What inside the statement may not be part of a region: before a backward any barrier, anywhere a suspension."""
    for node in walk_here(statement):
        if _suspends(node):
            return node
    for call in calls:
        for part in _earlier(_path(statement, call)):
            if _is_barrier(part, roots):
                return part
    return None


def _earlier(path: Path) -> Iterator[ast.AST]:
    """What runs before the end of a path, inside its start: earlier statements of each block, and heads of blocks."""
    for (node, field), (child, _) in pairwise(path):
        if isinstance(node, ast.With | ast.AsyncWith) and field == "body":
            yield from node.items
        elif isinstance(node, ast.If) and field != "test":
            yield node.test
        elif isinstance(node, ast.Try) and field != "body":
            yield from node.body
        block = getattr(node, field)
        if isinstance(block, list) and isinstance(child, ast.stmt):
            yield from block[: block.index(child)]


# What is refused ---------------------------------------------------------------------------------------------------


def _check_suspensions(source: Source, region: Region, roots: frozenset[str]) -> None:
    """Refuse where the function gives up control between the forward and the backward, as far as can be seen."""
    first = region.statements[0].lineno
    above = [
        node
        for statement in region.loop.body
        for node in walk_here(statement)
        if getattr(node, "lineno", first) < first
    ]
    pauses: list[Any] = [node for node in above if _suspends(node)]
    if not pauses:
        return
    pause = pauses[-1]
    earlier = [node for node in above if isinstance(node, ast.stmt) and node.lineno <= pause.lineno]
    earlier = [node for node in earlier if not _holds(node, region.calls[0])]
    held = bound_names(earlier) & read_names(region.statements) - roots - set(region.target_names)
    if held:
        raise LoopRefusal(
            f"line {pause.lineno} yields or waits between {min(held)!r} and the backward at line "
            f"{region.calls[0].lineno}: a microbatch cannot be held open over that; move it behind the backward",
            source.line(pause),
        )
