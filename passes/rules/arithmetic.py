"""Addition, multiplication, division. Zero times something is zero only where the something is finite."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from gradprune.passes import intervals
from gradprune.passes.affine import product, quotient, size_of
from gradprune.passes.domain import Known, Needs, Reach, Value
from gradprune.passes.flow import Flow, Node
from gradprune.passes.registry import rule
from gradprune.passes.transfer import dtype_of, operands, pointwise, shape_of


@rule("aten.add.Tensor", "aten.add.Scalar", "operator.add")
def add(flow: Flow, node: Node, a: Any, b: Any, alpha: Any = 1) -> Value:
    return _sum(flow, node, a, b, 1, alpha)


@rule("aten.sub.Tensor", "aten.sub.Scalar", "operator.sub")
def subtract(flow: Flow, node: Node, a: Any, b: Any, alpha: Any = 1) -> Value:
    return _sum(flow, node, a, b, -1, alpha)


@rule("aten.rsub.Tensor", "aten.rsub.Scalar")
def subtract_from(flow: Flow, node: Node, a: Any, b: Any, alpha: Any = 1) -> Value | None:
    return _sum(flow, node, b, a, -1, 1) if alpha == 1 else None


def _sum(flow: Flow, node: Node, a: Any, b: Any, sign: int, alpha: Any) -> Value:
    """a + sign * alpha * b."""
    dtype = dtype_of(node)
    x, y = operands(flow, dtype, a, b)
    factor = flow.literal(alpha, dtype)
    scale = factor.const.value * sign if factor.const is not None and math.isfinite(factor.const.value) else None
    finite = flow.finite(alpha, dtype) is not None

    def combine(p: Known | None, q: Known | None) -> Known | None:
        if p is None or q is None or not finite:
            return None
        if q.value == 0:
            return Known(p.value, p.needs | q.needs)
        return Known(p.value + scale * q.value, p.needs | q.needs) if scale is not None else None

    scaled = intervals.multiplied(y.bounds, factor.bounds)
    scaled = intervals.negated(scaled) if sign < 0 else scaled
    opposite = (x.bounds[0] == -math.inf and scaled[1] == math.inf) or (
        x.bounds[1] == math.inf and scaled[0] == -math.inf
    )
    reaches = (flow.reach(a, dtype), flow.reach(b, dtype)) if node in flow.backward else (None, None)
    return pointwise(
        node,
        [x, y],
        combine,
        bounds=intervals.added(x.bounds, scaled),
        notnan=x.notnan and y.notnan and not opposite and scale is not None,
        reach=_added(*reaches, intervals.magnitude(factor.bounds)),
        broken=x.broken or y.broken or _opposite_infinities(x, y, sign),
    )


def _added(a: Reach | None, b: Reach | None, scale: float) -> Reach | None:
    return Reach((a.limit + scale * b.limit) * 1.01, a.needs | b.needs) if a is not None and b is not None else None


def _opposite_infinities(x: Value, y: Value, sign: int) -> bool:
    if x.const is None or y.const is None or x.const.needs or y.const.needs:
        return False
    return math.isinf(x.const.value) and x.const.value == -sign * y.const.value


@rule("aten.mul.Tensor", "aten.mul.Scalar", "operator.mul")
def multiply(flow: Flow, node: Node, a: Any, b: Any) -> Value:
    dtype = dtype_of(node)
    x, y = operands(flow, dtype, a, b)
    combine = _product_rule(flow.finite(a, dtype), flow.finite(b, dtype))
    return pointwise(node, [x, y], combine, **_product_facets(flow, node, a, b, x, y))


def _product_rule(finite_a: Needs | None, finite_b: Needs | None) -> Any:
    def combine(p: Known | None, q: Known | None) -> Known | None:
        if p is not None and q is not None:
            value = p.value * q.value
            return Known(value, p.needs | q.needs) if not math.isnan(value) else None
        if p is not None and p.value == 0 and finite_b is not None:
            return Known(0, p.needs | finite_b)
        if q is not None and q.value == 0 and finite_a is not None:
            return Known(0, q.needs | finite_a)
        return None

    return combine


def _product_facets(flow: Flow, node: Node, a: Any, b: Any, x: Value, y: Value) -> dict[str, Any]:
    bounds = intervals.multiplied(x.bounds, y.bounds)
    if a is b:
        bounds = (max(bounds[0], 0.0), bounds[1])
    reach = None
    if node in flow.backward:
        p, q = flow.reach(a, x.dtype), flow.reach(b, x.dtype)
        reach = Reach(p.limit * q.limit * 1.01, p.needs | q.needs) if p is not None and q is not None else None
    nan = (_may_be_zero(x) and _may_be_infinite(y)) or (_may_be_zero(y) and _may_be_infinite(x))
    notnan = x.notnan and y.notnan and not nan
    return {"bounds": bounds, "notnan": notnan, "reach": reach, "broken": x.broken or y.broken}


def _may_be_zero(value: Value) -> bool:
    return value.bounds[0] <= 0 <= value.bounds[1]


def _may_be_infinite(value: Value) -> bool:
    return math.isinf(value.bounds[0]) or math.isinf(value.bounds[1])


@rule("aten.div.Tensor", "aten.div.Scalar", "operator.truediv")
def divide(flow: Flow, node: Node, a: Any, b: Any) -> Value:
    x, y = operands(flow, dtype_of(node), a, b)
    if _is_count_of(flow, node, b):
        y = replace(y, bounds=(max(y.bounds[0], 1.0), y.bounds[1]))
    nonzero = flow.nonzero(b, y.dtype) if _may_be_zero(y) else flow.notnan(b)
    bounds = intervals.divided(x.bounds, y.bounds)
    zero_divisor = y.const is not None and y.const.value == 0
    reach = _quotient_reach(flow, a, b, y) if node in flow.backward else None
    apart = not _may_be_zero(y)
    return pointwise(
        node,
        [x, y],
        _quotient_rule(nonzero, lambda p, q: p / q),
        bounds=bounds,
        notnan=x.notnan and y.notnan and apart and not (_may_be_infinite(x) and _may_be_infinite(y)),
        reach=reach,
        broken=zero_divisor or x.broken,
    )


def _is_count_of(flow: Flow, node: Node, divisor: Any) -> bool:
    """Whether the divisor is a size that divides the number of results: then it is not 0, or there is no result."""
    meta = divisor.meta.get("val") if isinstance(divisor, Node) else None
    if not isinstance(meta, torch.SymInt) or flow.size_bounds(size_of(meta))[0] < 0:
        return False
    return quotient(product(size_of(size) for size in shape_of(node)), size_of(meta)) is not None


def _quotient_rule(nonzero: Needs | None, divide: Any) -> Any:
    def combine(p: Known | None, q: Known | None) -> Known | None:
        if p is not None and q is not None:
            if q.value == 0 or (math.isinf(p.value) and math.isinf(q.value)):
                return None
            return Known(divide(p.value, q.value), p.needs | q.needs)
        if p is not None and p.value == 0 and nonzero is not None:
            return Known(0, p.needs | nonzero)
        return None

    return combine


def _quotient_reach(flow: Flow, a: Any, b: Any, divisor: Value) -> Reach | None:
    dividend, notnan = flow.reach(a, divisor.dtype), flow.notnan(b)
    if dividend is None or notnan is None or _may_be_zero(divisor):
        return None
    least = min(abs(divisor.bounds[0]), abs(divisor.bounds[1]))
    return Reach(dividend.limit / least * 1.01, dividend.needs | notnan)


@rule("aten.div.Tensor_mode", "aten.div.Scalar_mode", "aten.floor_divide.default", "aten.floor_divide.Scalar")
def divide_and_round(flow: Flow, node: Node, a: Any, b: Any, rounding_mode: str | None = "floor") -> Value:
    if rounding_mode is None:
        return divide(flow, node, a, b)
    x, y = operands(flow, dtype_of(node), a, b)
    toward = math.floor if rounding_mode == "floor" else math.trunc

    def whole(p: Any, q: Any) -> float:
        return toward(p / q) if math.isfinite(p) and math.isfinite(q) else math.nan

    return pointwise(
        node, [x, y], _quotient_rule(flow.nonzero(b, y.dtype), whole), broken=y.const is not None and y.const.value == 0
    )


@rule("aten.neg.default", "operator.neg")
def negate(flow: Flow, node: Node, a: Any) -> Value:
    (x,) = operands(flow, dtype_of(node), a)
    return pointwise(
        node,
        [x],
        lambda p: Known(-p.value, p.needs) if p is not None else None,
        bounds=intervals.negated(x.bounds),
        notnan=x.notnan,
        reach=flow.reach(a) if node in flow.backward else None,
        broken=x.broken,
    )


@rule("aten.addcmul.default")
def add_product(flow: Flow, node: Node, base: Any, a: Any, b: Any, value: Any = 1) -> Value:
    """base + value * a * b."""
    dtype = dtype_of(node)
    x, y, z = operands(flow, dtype, base, a, b)
    scale, finite = flow.literal(value, dtype).const, flow.finite(value, dtype) is not None
    factors = _product_rule(flow.finite(a, dtype), flow.finite(b, dtype))

    def combine(p: Known | None, q: Known | None, r: Known | None) -> Known | None:
        term = factors(q, r)
        if p is None or term is None or not finite:
            return None
        if term.value == 0:
            return Known(p.value, p.needs | term.needs)
        return Known(p.value + scale.value * term.value, p.needs | term.needs) if scale is not None else None

    return pointwise(node, [x, y, z], combine)


@rule("aten.addcdiv.default")
def add_quotient(flow: Flow, node: Node, base: Any, a: Any, b: Any, value: Any = 1) -> Value:
    """base + value * a / b, where a / b is zero."""
    dtype = dtype_of(node)
    x, y, z = operands(flow, dtype, base, a, b)
    ratio, finite = _quotient_rule(flow.nonzero(b, dtype), lambda p, q: p / q), flow.finite(value, dtype) is not None

    def combine(p: Known | None, q: Known | None, r: Known | None) -> Known | None:
        term = ratio(q, r)
        if p is None or term is None or term.value != 0 or not finite:
            return None
        return Known(p.value, p.needs | term.needs)

    return pointwise(node, [x, y, z], combine)


@rule("aten.lerp.Scalar", "aten.lerp.Tensor")
def interpolate(flow: Flow, node: Node, start: Any, end: Any, weight: Any) -> Value:
    """start + weight * (end - start), where both ends are zero."""
    values = operands(flow, dtype_of(node), start, end, weight)
    finite = flow.finite(weight, dtype_of(node))

    def combine(p: Known | None, q: Known | None, _: Known | None) -> Known | None:
        if p is None or q is None or p.value != 0 or q.value != 0 or finite is None:
            return None
        return Known(0, p.needs | q.needs | finite)

    return pointwise(node, values, combine)


@rule("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.fmod.Tensor", "aten.fmod.Scalar")
def remainder(flow: Flow, node: Node, a: Any, b: Any) -> Value:
    """Zero modulo anything but zero (and NaN) is zero."""
    x, y = operands(flow, dtype_of(node), a, b)
    nonzero = flow.nonzero(b, dtype_of(node))

    def combine(p: Known | None, q: Known | None) -> Known | None:
        divisor = q.needs if q is not None and q.value != 0 else nonzero if q is None else None
        return Known(0, p.needs | divisor) if p is not None and p.value == 0 and divisor is not None else None

    return pointwise(node, [x, y], combine)


@rule("aten.xlogy.Tensor", "aten.xlogy.Scalar_Other", "aten.special_xlog1py.default")
def multiply_by_log(flow: Flow, node: Node, a: Any, b: Any) -> Value:
    """x * log(y), defined as 0 where x is 0 and y is not NaN."""
    x, y = operands(flow, dtype_of(node), a, b)
    notnan = flow.notnan(b)

    def combine(p: Known | None, q: Known | None) -> Known | None:
        clean = q.needs if q is not None else notnan
        return Known(0, p.needs | clean) if p is not None and p.value == 0 and clean is not None else None

    return pointwise(node, [x, y], combine)
