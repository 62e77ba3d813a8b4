"""Powers and reciprocals. ``x ** 0`` is 1 for every x, NaN included; 1 / 0 and 0 ** -1 are infinite."""

from __future__ import annotations

import math
from typing import Any

from gradprune.passes import intervals
from gradprune.passes.domain import Known, Needs, Number, Reach, Value
from gradprune.passes.flow import Flow, Node
from gradprune.passes.intervals import ANY, Interval
from gradprune.passes.registry import rule
from gradprune.passes.transfer import dtype_of, operands, pointwise


@rule("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar", "operator.pow", "math.pow")
def power(flow: Flow, node: Node, base: Any, exponent: Any) -> Value:
    dtype = dtype_of(node)
    x, y = operands(flow, dtype, base, exponent)
    positive = flow.notnan(exponent) if y.bounds[0] > 0 else None

    def combine(p: Known | None, q: Known | None) -> Known | None:
        return _power_of_known(p, q, positive)

    number = exponent if isinstance(exponent, int | float) and not isinstance(exponent, bool) else None
    bounds, clean = _power_bounds(x.bounds, number)
    reach = flow.reach(base) if node in flow.backward and number is not None and number >= 1 and clean else None
    return pointwise(
        node,
        [x, y],
        combine,
        bounds=bounds,
        notnan=x.notnan and clean,
        reach=Reach(_overflowing_power(reach.limit, number) * 1.01, reach.needs) if reach and number else None,
        broken=x.broken and number is not None and number > 0,
    )


def _power_of_known(p: Known | None, q: Known | None, positive: Needs | None) -> Known | None:
    if q is not None and q.value == 0:
        return Known(1, q.needs)
    if p is not None and p.value == 1:
        return Known(1, p.needs)
    if p is None:
        return None
    if q is None:
        return Known(0, p.needs | positive) if p.value == 0 and positive is not None else None
    value = _whole_power(p.value, q.value)
    return Known(value, p.needs | q.needs) if value is not None else None


def _whole_power(p: Number, q: Number) -> float | None:
    """p ** q where every kernel gives the exact result: zero to a positive power, small whole numbers."""
    if p == 0:
        return 0 if q > 0 else None
    small = math.isfinite(p) and float(p).is_integer() and q in (1, 2)
    return float(p) ** q if small else None


def _power_bounds(base: Interval, exponent: float | None) -> tuple[Interval, bool]:
    """Bounds, and whether a base that is not NaN gives a result that is not NaN."""
    low, high = base
    if exponent is None:
        return ANY, False
    whole = float(exponent).is_integer()
    if exponent < 0:
        return ((0.0, math.inf) if whole and exponent % 2 == 0 else ANY), whole
    if whole and exponent % 2 == 0:
        return (0.0, _overflowing_power(intervals.magnitude(base), exponent) * 1.01), True
    if low >= 0:
        return (0.0, _overflowing_power(high, exponent) * 1.01), True
    return ANY, whole


def _overflowing_power(base: float, exponent: float) -> float:
    try:
        return float(base**exponent)
    except OverflowError:
        return math.inf


@rule("aten.reciprocal.default")
def reciprocal(flow: Flow, node: Node, a: Any) -> Value:
    (x,) = operands(flow, dtype_of(node), a)
    apart = not x.bounds[0] <= 0 <= x.bounds[1]
    return pointwise(
        node,
        [x],
        lambda p: Known(1 / p.value, p.needs) if p is not None and p.value != 0 else None,
        bounds=intervals.divided((1.0, 1.0), x.bounds),
        notnan=x.notnan,
        reach=_inverse_reach(flow, node, a, 1 / _least(x)) if apart else None,
        broken=x.const is not None and x.const.value == 0,
    )


@rule("aten.rsqrt.default")
def reciprocal_root(flow: Flow, node: Node, a: Any) -> Value:
    """``1 / sqrt(x)``: -inf at -0.0, so a bound of zero bounds nothing."""
    (x,) = operands(flow, dtype_of(node), a)
    positive = x.bounds[0] > 0
    largest = x.bounds[0] ** -0.5 * 1.01 if positive else math.inf
    return pointwise(
        node,
        [x],
        lambda p: (
            Known(0 if p.value == math.inf else 1, p.needs) if p is not None and p.value in (1, math.inf) else None
        ),
        bounds=(0.0, largest) if positive else ANY,
        notnan=x.notnan and x.bounds[0] >= 0,
        reach=_inverse_reach(flow, node, a, largest) if positive else None,
        broken=x.const is not None and x.const.value == 0,
    )


def _least(x: Value) -> float:
    return min(abs(x.bounds[0]), abs(x.bounds[1]))


def _inverse_reach(flow: Flow, node: Node, a: Any, limit: float) -> Reach | None:
    notnan = flow.notnan(a) if node in flow.backward else None
    return Reach(limit * 1.01, notnan) if notnan is not None else None


@rule("aten.atan2.default", "aten.hypot.default", "aten.copysign.Tensor", "aten.copysign.Scalar")
def of_two_signs(flow: Flow, node: Node, a: Any, b: Any) -> Value:
    """atan2(0, x) is pi or -pi for negative x and for -0.0; hypot and copysign of zero are zero where the other is."""
    x, y = operands(flow, dtype_of(node), a, b)
    name = str(node.target)
    sign_only = "copysign" in name
    positive = flow.notnan(b) if "atan2" in name and y.bounds[0] > 0 else None

    def combine(p: Known | None, q: Known | None) -> Known | None:
        if p is None or p.value != 0:
            return None
        if sign_only:
            return Known(0, p.needs)
        if "hypot" in name:
            return Known(abs(q.value), p.needs | q.needs) if q is not None else None
        if q is not None:
            return Known(0, p.needs | q.needs) if q.value > 0 else None
        return Known(0, p.needs | positive) if positive is not None else None

    return pointwise(node, [x, y], combine)


@rule("aten.heaviside.default")
def heaviside(flow: Flow, node: Node, a: Any, at_zero: Any) -> Value:
    x, y = operands(flow, dtype_of(node), a, at_zero)

    def combine(p: Known | None, q: Known | None) -> Known | None:
        if p is None:
            return None
        if p.value != 0:
            return Known(1 if p.value > 0 else 0, p.needs)
        return Known(q.value, p.needs | q.needs) if q is not None else None

    return pointwise(node, [x, y], combine)
