"""Which names statements read and bind, seen from the function that they stand in: nested scopes are told apart."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def walk_here(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and what is inside, in order of the source, but not the bodies of functions and classes in it."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _SCOPES):
            yield child
            for part in (*getattr(child, "decorator_list", ()), *getattr(child, "bases", ())):
                yield from walk_here(part)
            continue
        yield from walk_here(child)


def read_names(statements: Iterable[ast.AST]) -> set[str]:
    """Names that are read, in nested functions too: those that could be read while the statements run."""
    return {
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def bound_names(statements: Iterable[ast.AST]) -> set[str]:
    """Names that are bound anew: assigned, imported, defined, deleted, targets of loops, ``with`` and ``except``."""
    return {name for statement in statements for name in _bound(statement)}


def _bound(node: ast.AST) -> Iterator[str]:
    comprehension = isinstance(node, _COMPREHENSIONS)
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name.split(".")[0]) for alias in node.names)
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest
    if isinstance(node, _SCOPES):
        return
    for child in ast.iter_child_nodes(node):
        if comprehension and isinstance(child, ast.comprehension):  # its target is its own; a walrus in it is not
            yield from _walrus(child)
        else:
            yield from _bound(child)


def _walrus(node: ast.AST) -> Iterator[str]:
    yield from (child.target.id for child in walk_here(node) if isinstance(child, ast.NamedExpr))


def changed_names(statement: ast.AST) -> set[str]:
    """Names that a statement binds, and names whose value it writes into: ``batch["x"] = ...``, ``batch.update()``."""
    changed = bound_names([statement])
    for node in walk_here(statement):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed |= _root(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            changed |= _root(called) if isinstance(called, ast.Attribute) else set()
    return changed


def _root(node: ast.expr) -> set[str]:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def blocks_of(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The lists of statements right inside a compound statement."""
    found: list[list[ast.stmt]] = []
    for field in _BLOCKS:
        for item in [getattr(statement, field, None)]:
            if item and isinstance(item[0], ast.stmt):
                found.append(item)
            elif item:
                found += [part.body for part in item]
    return found


def needed_names(statements: Sequence[ast.stmt]) -> list[str]:
    """Names whose values from before the statements may read: all that they read but those surely bound first."""
    return sorted(_read_first(statements, set()))


def _read_first(statements: Sequence[ast.stmt], sure: set[str]) -> set[str]:
    """Names read while not surely bound; adds to `sure` what the statements surely bind."""
    found: set[str] = set()
    for statement in statements:
        if isinstance(statement, ast.With):
            headers = [item.context_expr for item in statement.items]
            found |= read_names(headers) - sure
            sure |= bound_names([item.optional_vars for item in statement.items if item.optional_vars])
            found |= _read_first(statement.body, sure)
            continue
        found |= read_names([statement]) - sure
        if isinstance(statement, ast.AugAssign):
            found |= bound_names([statement]) - sure
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Import | ast.ImportFrom):
            sure |= bound_names([statement])
    return found
