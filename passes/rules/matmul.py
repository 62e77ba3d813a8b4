"""Products that contract a dimension: linear in each operand, so zero times anything finite is zero."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gradprune.passes.affine import groups_of, match_groups
from gradprune.passes.domain import (
    NO_NEEDS,
    Facts,
    Key,
    Known,
    Needs,
    Value,
    cost,
    joined_rows,
    moved_facts,
    moved_rows,
)
from gradprune.passes.flow import Flow, Node
from gradprune.passes.registry import rule
from gradprune.passes.transfer import dtype_of, forgotten, shape_of

Places = Mapping[int, int]
"""Dimension of an operand -> dimension of the result; the others are contracted."""


def contracted(flow: Flow, node: Node, a: Any, b: Any, places_a: Places, places_b: Places) -> Value:
    dims = groups_of(shape_of(node))
    const: Known | None = None
    facts: dict[Key, Known] = {}
    rows = []
    for operand, other, places in ((a, b, places_a), (b, a, places_b)):
        value, finite = flow.value(operand), flow.finite(other)
        mapping = forgotten(group for place, group in enumerate(value.dims) if place not in places)
        for place, target in places.items():
            match_groups(value.dims[place], dims[target], mapping)
        rows.append(moved_rows(value.rows, mapping))
        if finite is None:
            continue
        if value.is_zero() and value.const is not None and const is None:
            const = Known(0, value.const.needs | finite)
        facts |= _zeros(moved_facts(value.facts, mapping), finite, facts)
    return Value(dims, dtype_of(node), const, facts, rows=joined_rows(rows))


def _zeros(found: Facts, finite: Needs, before: Facts) -> dict[Key, Known]:
    return {
        key: Known(0, known.needs | finite) for key, known in found.items() if known.value == 0 and key not in before
    }


@rule("aten.mm.default")
def mm(flow: Flow, node: Node, a: Any, b: Any) -> Value:
    return contracted(flow, node, a, b, {0: 0}, {1: 1})


@rule("aten.bmm.default")
def bmm(flow: Flow, node: Node, a: Any, b: Any) -> Value:
    return contracted(flow, node, a, b, {0: 0, 1: 1}, {0: 0, 2: 2})


@rule("aten.mv.default")
def mv(flow: Flow, node: Node, a: Any, b: Any) -> Value:
    return contracted(flow, node, a, b, {0: 0}, {})


@rule("aten.dot.default", "aten.vdot.default")
def dot(flow: Flow, node: Node, a: Any, b: Any) -> Value:
    return contracted(flow, node, a, b, {}, {})


@rule("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default", "aten.addbmm.default")
def add_product(flow: Flow, node: Node, base: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Value | None:
    """Zero where the product and the base are all zero; positions are not followed."""
    if not (math.isfinite(alpha) and math.isfinite(beta)):
        return None
    return _all_zero(flow, node, [base], [(a, b)])


@rule("aten.linear.default", "aten.matmul.default", "aten.convolution.default", "aten._convolution.default")
def linear(flow: Flow, node: Node, a: Any, weight: Any, bias: Any = None, *_: Any) -> Value:
    return _all_zero(flow, node, [bias] if bias is not None else [], [(a, weight)])


def _all_zero(flow: Flow, node: Node, bases: list[Any], products: list[tuple[Any, Any]]) -> Value:
    needs: Needs | None = NO_NEEDS
    for base in bases:
        value = flow.value(base)
        needs = needs | value.const.needs if needs is not None and value.is_zero() and value.const else None
    for a, b in products:
        zero = _zero_product(flow, a, b)
        needs = needs | zero if needs is not None and zero is not None else None
    return Value(groups_of(shape_of(node)), dtype_of(node), Known(0, needs) if needs is not None else None)


def _zero_product(flow: Flow, a: Any, b: Any) -> Needs | None:
    options = []
    for operand, other in ((a, b), (b, a)):
        value, finite = flow.value(operand), flow.finite(other)
        if value.is_zero() and value.const is not None and finite is not None:
            options.append(value.const.needs | finite)
    return min(options, key=cost, default=None)
