"""Comparisons and logic. A comparison with NaN is False, and ``!=`` is True."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gradprune.passes.domain import NO_NEEDS, Known, Needs, Value, cheapest
from gradprune.passes.flow import Flow, Node
from gradprune.passes.registry import rule
from gradprune.passes.transfer import computed_in, dtype_of, operands, pointwise


class Extent(NamedTuple):
    """What an operand can be at a position; `notnan` makes it not NaN (None: it may always be)."""

    low: float
    high: float
    needs: Needs
    notnan: Needs | None


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_OVERLOADS = tuple(f"aten.{name}.{overload}" for name in _OPERATORS for overload in ("Tensor", "Scalar"))


@rule(*_OVERLOADS, *(f"operator.{name}" for name in _OPERATORS))
def compare(flow: Flow, node: Node, a: Any, b: Any) -> Value:
    name = str(getattr(node.target, "__name__", node.target)).split(".")[0]
    x, y = operands(flow, computed_in(a, b), a, b)
    notnan_a, notnan_b = flow.notnan(a), flow.notnan(b)

    def extent(known: Known | None, value: Value, notnan: Needs | None) -> Extent:
        if known is not None:
            return Extent(float(known.value), float(known.value), known.needs, NO_NEEDS)
        return Extent(*value.bounds, NO_NEEDS, notnan)

    def combine(p: Known | None, q: Known | None) -> Known | None:
        if a is b and isinstance(a, Node):
            return _compared_with_itself(name, notnan_a)
        return _decided(name, extent(p, x, notnan_a), extent(q, y, notnan_b))

    return pointwise(node, [x, y], combine)


def _compared_with_itself(name: str, notnan: Needs | None) -> Known | None:
    if name in ("lt", "gt"):
        return Known(False)
    return Known(name != "ne", notnan) if notnan is not None else None


def _decided(name: str, a: Extent, b: Extent) -> Known | None:
    """The outcome, where the extents decide it."""
    if name in ("gt", "ge"):
        return _decided({"gt": "lt", "ge": "le"}[name], b, a)
    needs = a.needs | b.needs
    clean = needs | a.notnan | b.notnan if a.notnan is not None and b.notnan is not None else None
    point = a.low == a.high == b.low == b.high
    disjoint = a.high < b.low or b.high < a.low
    if name in ("eq", "ne"):
        if disjoint:
            return Known(name == "ne", needs)
        return Known(name == "eq", clean) if point and clean is not None else None
    true, false = (a.high < b.low, a.low >= b.high) if name == "lt" else (a.high <= b.low, a.low > b.high)
    if false:
        return Known(False, needs)
    return Known(True, clean) if true and clean is not None else None


@rule(
    "aten.logical_and.default",
    "aten.bitwise_and.Tensor",
    "aten.bitwise_and.Scalar",
    "operator.and_",
)
def logical_and(flow: Flow, node: Node, a: Any, b: Any) -> Value | None:
    """False (for integers: 0) and anything is False."""
    if not _is_logical(node, a, b):
        return _integer_and(flow, node, a, b)

    def combine(p: Known | None, q: Known | None) -> Known | None:
        options = [Known(False, k.needs) for k in (p, q) if k is not None and not k.value]
        if p is not None and q is not None:
            options.append(Known(bool(p.value) and bool(q.value), p.needs | q.needs))
        return cheapest(options)

    return pointwise(node, [flow.value(a), flow.value(b)], combine)


def _integer_and(flow: Flow, node: Node, a: Any, b: Any) -> Value:
    def combine(p: Known | None, q: Known | None) -> Known | None:
        return cheapest(Known(0, k.needs) for k in (p, q) if k is not None and k.value == 0)

    return pointwise(node, operands(flow, dtype_of(node), a, b), combine)


def _is_logical(node: Node, a: Any, b: Any) -> bool:
    return "logical" in str(node.target) or dtype_of(node) == torch.bool


@rule("aten.logical_or.default", "aten.bitwise_or.Tensor", "aten.bitwise_or.Scalar", "operator.or_")
def logical_or(flow: Flow, node: Node, a: Any, b: Any) -> Value | None:
    if not _is_logical(node, a, b):
        return None

    def combine(p: Known | None, q: Known | None) -> Known | None:
        options = [Known(True, k.needs) for k in (p, q) if k is not None and k.value]
        if p is not None and q is not None:
            options.append(Known(bool(p.value) or bool(q.value), p.needs | q.needs))
        return cheapest(options)

    return pointwise(node, [flow.value(a), flow.value(b)], combine)


@rule("aten.logical_xor.default", "aten.bitwise_xor.Tensor", "aten.bitwise_xor.Scalar")
def logical_xor(flow: Flow, node: Node, a: Any, b: Any) -> Value | None:
    if not _is_logical(node, a, b):
        return None

    def combine(p: Known | None, q: Known | None) -> Known | None:
        if p is None or q is None:
            return None
        return Known(bool(p.value) != bool(q.value), p.needs | q.needs)

    return pointwise(node, [flow.value(a), flow.value(b)], combine)


@rule("aten.logical_not.default", "aten.bitwise_not.default", "operator.not_", "torch.sym_not")
def logical_not(flow: Flow, node: Node, a: Any) -> Value | None:
    if "bitwise" in str(node.target) and dtype_of(node) != torch.bool:
        return None
    return pointwise(node, [flow.value(a)], lambda p: Known(not p.value, p.needs) if p is not None else None)


@rule("aten.isnan.default")
def isnan(flow: Flow, node: Node, a: Any) -> Value:
    x = flow.value(a)
    clean = Known(False) if x.notnan else None
    return pointwise(node, [x], lambda p: clean or (Known(False, p.needs) if p is not None else None))


@rule("aten.isinf.default", "aten.isposinf.default", "aten.isneginf.default")
def isinf(flow: Flow, node: Node, a: Any) -> Value:
    x = flow.value(a)
    infinities = [s for s in (1, -1) if f"is{'pos' if s > 0 else 'neg'}inf" in str(node.target)] or [1, -1]
    bounded = abs(x.bounds[0]) != float("inf") and abs(x.bounds[1]) != float("inf")
    never = Known(False) if bounded else None

    def combine(p: Known | None) -> Known | None:
        return never or (Known(p.value in [s * float("inf") for s in infinities], p.needs) if p is not None else None)

    return pointwise(node, [x], combine)


@rule("aten.isfinite.default")
def isfinite(flow: Flow, node: Node, a: Any) -> Value:
    x = flow.value(a)
    always = Known(True) if x.finite else None
    return pointwise(
        node,
        [x],
        lambda p: always or (Known(abs(p.value) != float("inf"), p.needs) if p is not None else None),
    )
