"""The `zero` of a loop: a product of expressions over the names in its body, ``"batch['advantages'] * mask"``."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from types import CodeType
from typing import Any

from gradprune.errors import PruneError
from gradprune.facts import Hypothesis


@dataclass(frozen=True)
class Factor:
    """One expression of the product. name: as verdicts call it, ``"batch.advantages"``. roots: the names it reads."""

    text: str
    name: str
    roots: frozenset[str]
    code: CodeType

    def value(self, scope: dict[str, Any], outside: dict[str, Any]) -> Any:
        """Evaluate it where `scope` are the local names and `outside` the globals; whatever it raises comes out."""
        return eval(self.code, outside, scope)


def parse_factors(zero: str) -> tuple[Factor, ...]:
    """Split a product into its factors. Raises PruneError for what is no product of expressions over names."""
    if not isinstance(zero, str):
        raise PruneError(
            f"zero is a {type(zero).__name__}: write @gradprune.grpo_loop(zero=\"batch['advantages'] * batch['mask']\")"
        )
    try:
        nodes = _product(ast.parse(zero.strip(), mode="eval").body)
    except SyntaxError as error:
        raise PruneError(f"zero={zero!r} is not an expression: {error.msg}") from error
    factors = tuple(_factor(node) for node in nodes)
    nameless = [factor.text for factor in factors if not factor.roots]
    if nameless:
        raise PruneError(
            f"zero={zero!r} names nothing in {nameless[0]!r}: write a product of tensors that the loop's body can see, "
            "such as \"batch['advantages'] * batch['mask']\""
        )
    twice = {factor.text for factor in factors if sum(other.name == factor.name for other in factors) > 1}
    if twice:
        raise PruneError(f"zero={zero!r} names {min(twice)} twice: name each factor once")
    return factors


def hypothesis_of(factors: tuple[Factor, ...]) -> Hypothesis:
    return Hypothesis(tuple(factor.name for factor in factors))


def _product(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _product(node.left) + _product(node.right)
    return [node]


def _factor(node: ast.expr) -> Factor:
    roots = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    code = compile(ast.Expression(node), "<zero>", "eval")
    return Factor(ast.unparse(node), _dotted(node), frozenset(roots), code)


def _dotted(node: ast.expr) -> str:
    """The expression as the names of a batch's tensors read, so that both name one tensor alike."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        key = node.slice.value
        return f"{_dotted(node.value)}[{key}]" if isinstance(key, int) else f"{_dotted(node.value)}.{key!s}"
    return ast.unparse(node)
