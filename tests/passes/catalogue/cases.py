"""The table of cases: operator name -> a function that applies it to random operands of a `Builder`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.passes.builder import Builder, Node, aten

Case = Callable[[Builder], Any]
CASES: dict[str, Case] = {}


def operator_of(name: str) -> Any:
    _, packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


def case(*names: str) -> Callable[[Callable[[Builder, Any], Any]], Any]:
    """Register a function of (builder, operator) for operators; it returns the node, or None where it did not apply."""

    def register(apply: Callable[[Builder, Any], Any]) -> Any:
        for name in names:
            CASES[name] = _bound(apply, operator_of(name))
        return apply

    return register


def _bound(apply: Callable[[Builder, Any], Any], operator: Any) -> Case:
    return lambda b: apply(b, operator)


def dim_of(b: Builder, node: Node) -> int:
    """Any dimension of the node, counted from either end."""
    rank = max(len(b.shape(node)), 1)
    return b.random.randint(-rank, rank - 1)
