"""Expressions over sizes as text: what a proof that comes from a file may hold, and nothing else may be evaluated."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from typing import Any

from gradprune.errors import PruneError
from gradprune.formulas import FUNCTIONS

_ALLOWED: dict[str, Any] = {
    **FUNCTIONS,
    "Eq": lambda a, b: a == b,
    "Ne": lambda a, b: a != b,
    "And": lambda *terms: all(terms),
    "Or": lambda *terms: any(terms),
    "Not": lambda term: not term,
    "true": True,
    "false": False,
}
_NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Name, ast.Constant, ast.Load),
    *(ast.operator, ast.unaryop, ast.cmpop),
)


@cache
def _compiled(text: str) -> Any:
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise PruneError(f"{text!r} is no expression over sizes: remove the file that holds it") from error
    for node in ast.walk(tree):
        wrong = not isinstance(node, _NODES)
        wrong = wrong or (isinstance(node, ast.Constant) and not isinstance(node.value, int | float))
        wrong = wrong or (isinstance(node, ast.Call) and not isinstance(node.func, ast.Name))
        if wrong:
            raise PruneError(f"{text!r} is no expression over sizes: remove the file that holds it")
    return compile(tree, "<size>", "eval")


def symbols_in(text: str) -> frozenset[str]:
    """The names in an expression that stand for sizes."""
    return frozenset(_compiled(text).co_names) - _ALLOWED.keys()


def evaluate_text(text: str, sizes: Mapping[str, int]) -> Any:
    """Value of an expression, sympy's way of writing it. Raises PruneError for text that is anything else."""
    return eval(_compiled(text), {"__builtins__": {}, **_ALLOWED}, dict(sizes))
