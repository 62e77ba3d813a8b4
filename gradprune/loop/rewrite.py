"""Rewrite the loop of a function: its region runs under a microbatch.

    for step, batch in enumerate(batches):
        _plan = _gradprune.planned(step, batch)
        with _gradprune.microbatch(_gradprune.locals()) as _microbatch:
            loss = compute(model, batch)
            _microbatch.loss(loss).backward()
        optimizer.step()

Every node keeps the line that it came from; new ones take the line of the statement that they stand at.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradprune.loop.names import blocks_of
from gradprune.loop.region import Loop, Region
from gradprune.loop.source import Function, Source


@dataclass(frozen=True)
class Names:
    """What the rewritten function calls gradprune's objects: names that it does not use itself."""

    runtime: str
    microbatch: str
    plan: str

    @classmethod
    def fresh(cls, source: Source) -> Names:
        return cls(source.fresh("_gradprune"), source.fresh("_microbatch"), source.fresh("_plan"))


@dataclass(frozen=True)
class Rewritten:
    """A tree with its region rewritten."""

    tree: Function
    names: Names

    @property
    def text(self) -> str:
        """The rewritten function as Python text, without its decorators."""
        shown = copy.copy(self.tree)
        shown.decorator_list = []
        return ast.unparse(shown)


def rewrite(source: Source, region: Region) -> Rewritten:
    """The function of `source` with `region`, which is part of its tree, rewritten. The tree of `source` is changed."""
    names = Names.fresh(source)
    _send_losses(region.calls, names)
    watched = _announce_leaving(region.statements, region.loop, names)
    opening = f"with {names.runtime}.microbatch({names.runtime}.locals()) as {names.microbatch}: pass"
    block: Any = _parse(opening, region.statements[0])
    block.body = watched
    region.block[region.start : region.stop] = [block]
    if region.target_names:
        values = ", ".join(region.target_names)
        region.loop.body.insert(0, _parse(f"{names.plan} = {names.runtime}.planned({values})", region.loop))
    return Rewritten(source.tree, names)


def _parse(text: str, place: ast.AST) -> ast.stmt:
    """A statement all of which stands at the line of `place`."""
    statement = ast.parse(text).body[0]
    for node in ast.walk(statement):
        if isinstance(node, ast.stmt | ast.expr | ast.alias):
            ast.copy_location(node, place)
            node.end_lineno, node.end_col_offset = node.lineno, node.col_offset
    return statement


def _send_losses(calls: Sequence[ast.Call], names: Names) -> None:
    """``x.backward(y)`` becomes ``m.loss(x).backward(m.loss(y))``: only at run time it is clear which is the loss."""
    for call in calls:
        assert isinstance(call.func, ast.Attribute)
        call.func.value = _sent(call.func.value, names)
        if call.args and not isinstance(call.args[0], ast.Starred):
            call.args[0] = _sent(call.args[0], names)
        for keyword in call.keywords:
            if keyword.arg == "loss":
                keyword.value = _sent(keyword.value, names)


def _sent(value: ast.expr, names: Names) -> ast.expr:
    statement: Any = _parse(f"{names.microbatch}.loss(value)", value)
    statement.value.args = [value]
    statement.value.end_lineno, statement.value.end_col_offset = value.end_lineno, value.end_col_offset
    return statement.value


def _announce_leaving(statements: Sequence[ast.stmt], loop: Loop, names: Names) -> list[ast.stmt]:
    """The statements, with a call before each one that leaves the region for good: return, break, continue."""
    changed: list[ast.stmt] = []
    for statement in statements:
        inner_loop = isinstance(statement, ast.For | ast.AsyncFor | ast.While)
        if isinstance(statement, ast.Return) or (isinstance(statement, ast.Break | ast.Continue) and loop is not None):
            changed.append(_parse(f"{names.microbatch}.leave()", statement))
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for block in blocks_of(statement):
                within_body = inner_loop and block is statement.body  # type: ignore[attr-defined]
                block[:] = _announce_leaving(block, None if within_body else loop, names)  # type: ignore[arg-type]
        changed.append(statement)
    return changed
