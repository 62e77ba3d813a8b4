"""Operators that pass one of their operands on: where, clamp, maximum, minimum."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gradprune.passes import intervals
from gradprune.passes.domain import Known, Needs, Reach, Value, cheapest
from gradprune.passes.flow import Flow, Node
from gradprune.passes.registry import rule
from gradprune.passes.transfer import dtype_of, operands, pointwise

Pick = Callable[[Known | None, Known | None], Known | None]


@rule("aten.where.self")
def where(flow: Flow, node: Node, condition: Any, a: Any, b: Any) -> Value:
    """The operand that is not picked does not matter, not even where it is NaN."""
    x, y = operands(flow, dtype_of(node), a, b)
    chosen = flow.value(condition)
    picked = None if chosen.const is None else (x if chosen.const.value else y)
    reaches = (flow.reach(a), flow.reach(b)) if node in flow.backward else (None, None)
    return pointwise(
        node,
        [chosen, x, y],
        picked_by_condition,
        bounds=intervals.joined(x.bounds, y.bounds),
        notnan=x.notnan and y.notnan,
        reach=_larger(*reaches),
        broken=picked.broken if picked is not None else x.broken and y.broken,
    )


def picked_by_condition(condition: Known | None, p: Known | None, q: Known | None) -> Known | None:
    options = []
    if p is not None and q is not None and p.value == q.value:
        options.append(Known(p.value, p.needs | q.needs))
    picked = None if condition is None else (p if condition.value else q)
    if condition is not None and picked is not None:
        options.append(Known(picked.value, picked.needs | condition.needs))
    return cheapest(options)


def _larger(a: Reach | None, b: Reach | None) -> Reach | None:
    return Reach(max(a.limit, b.limit), a.needs | b.needs) if a is not None and b is not None else None


@rule("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(flow: Flow, node: Node, a: Any, mask: Any, value: Any) -> Value:
    return where(flow, node, mask, value, a)


@rule("aten.maximum.default", "math.max", "torch.sym_max")
def maximum(flow: Flow, node: Node, a: Any, b: Any) -> Value:
    return _extremum(flow, node, a, b, larger=True)


@rule("aten.minimum.default", "torch.sym_min")
def minimum(flow: Flow, node: Node, a: Any, b: Any) -> Value:
    return _extremum(flow, node, a, b, larger=False)


def _extremum(flow: Flow, node: Node, a: Any, b: Any, *, larger: bool) -> Value:
    x, y = operands(flow, dtype_of(node), a, b)
    return pointwise(
        node,
        [x, y],
        _pick(x, y, flow.notnan(a), flow.notnan(b), larger=larger),
        bounds=_extremum_bounds(x, y, larger=larger),
        notnan=x.notnan and y.notnan,
        reach=_larger(flow.reach(a), flow.reach(b)) if node in flow.backward else None,
        broken=x.broken and y.broken,
    )


def _extremum_bounds(x: Value, y: Value, *, larger: bool) -> intervals.Interval:
    pick = max if larger else min
    return (pick(x.bounds[0], y.bounds[0]), pick(x.bounds[1], y.bounds[1]))


def _pick(x: Value, y: Value, notnan_x: Needs | None, notnan_y: Needs | None, *, larger: bool) -> Pick:
    """Both known; or one known and the other within bounds on the losing side, and not NaN (NaN wins)."""

    def loses(other: Value, value: float) -> bool:
        return other.bounds[1] <= value if larger else other.bounds[0] >= value

    def combine(p: Known | None, q: Known | None) -> Known | None:
        if p is not None and q is not None:
            return Known((max if larger else min)(p.value, q.value), p.needs | q.needs)
        if p is not None and notnan_y is not None and loses(y, p.value):
            return Known(p.value, p.needs | notnan_y)
        if q is not None and notnan_x is not None and loses(x, q.value):
            return Known(q.value, q.needs | notnan_x)
        return None

    return combine


@rule("aten.fmax.default", "aten.fmin.default")
def extremum_but_nan(flow: Flow, node: Node, a: Any, b: Any) -> Value:
    """Ignores a NaN, so only two known operands tell the result."""
    x, y = operands(flow, dtype_of(node), a, b)
    larger = "fmax" in str(node.target)

    def combine(p: Known | None, q: Known | None) -> Known | None:
        if p is None or q is None:
            return None
        return Known((max if larger else min)(p.value, q.value), p.needs | q.needs)

    return pointwise(node, [x, y], combine, bounds=intervals.joined(x.bounds, y.bounds))


@rule("aten.clamp.default", "aten.clamp.Tensor", "aten.hardtanh.default")
def clamp(flow: Flow, node: Node, a: Any, low: Any = None, high: Any = None) -> Value:
    """``minimum(maximum(a, low), high)``."""
    if "hardtanh" in str(node.target):
        low, high = -1 if low is None else low, 1 if high is None else high
    limits = [limit for limit in (low, high) if limit is not None]
    dtype = dtype_of(node)
    x, *others = operands(flow, dtype, a, *limits)
    bounds, notnan, picks = x.bounds, flow.notnan(a), []
    for limit, other, larger in zip(limits, others, (True, False) if low is not None else (False,)):
        seen, limit_notnan = Value((), dtype, bounds=bounds), flow.notnan(limit)
        picks.append(_pick(seen, other, notnan, limit_notnan, larger=larger))
        bounds = _extremum_bounds(seen, other, larger=larger)
        notnan = notnan | limit_notnan if notnan is not None and limit_notnan is not None else None

    def combine(p: Known | None, *known: Known | None) -> Known | None:
        for pick, limit in zip(picks, known):
            p = pick(p, limit)
        return p

    limit = intervals.magnitude(bounds)
    bounded = (
        node in flow.backward
        and math.isfinite(limit)
        and notnan is not None
        and not any(isinstance(other, Node) for other in limits)
    )
    return pointwise(
        node,
        [x, *others],
        combine,
        bounds=bounds,
        notnan=all(value.notnan for value in (x, *others)),
        reach=Reach(limit, notnan or frozenset()) if bounded else None,
    )


@rule("aten.clamp_min.default", "aten.clamp_min.Tensor")
def clamp_min(flow: Flow, node: Node, a: Any, low: Any) -> Value:
    return clamp(flow, node, a, low)


@rule("aten.clamp_max.default", "aten.clamp_max.Tensor")
def clamp_max(flow: Flow, node: Node, a: Any, high: Any) -> Value:
    return clamp(flow, node, a, None, high)


@rule("aten.nan_to_num.default")
def nan_to_num(flow: Flow, node: Node, a: Any, nan: Any = None, above: Any = None, below: Any = None) -> Value:
    """NaN and infinities give way to numbers: 0 and the largest of the dtype by default."""
    dtype = dtype_of(node)
    (x,) = operands(flow, dtype, a)
    most = torch.finfo(dtype).max if dtype is not None and dtype.is_floating_point else math.inf
    numbers = [0.0 if nan is None else nan, most if above is None else above, -most if below is None else below]
    certain = all(math.isfinite(number) for number in numbers)
    low, high = max(x.bounds[0], -most), min(x.bounds[1], most)
    return pointwise(
        node,
        [x],
        lambda p: p if p is not None and math.isfinite(p.value) else None,
        bounds=(min(low, *numbers), max(high, *numbers)) if certain else intervals.ANY,
        notnan=certain,
    )
