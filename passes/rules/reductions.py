"""Operators that combine the elements along dimensions. A sum of zeros is zero in any order; an empty mean is NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gradprune.passes import intervals
from gradprune.passes.affine import Group, Size, product
from gradprune.passes.domain import NO_NEEDS, Known, Needs, Number, Reach, Value, exact
from gradprune.passes.flow import Flow, Node
from gradprune.passes.intervals import ANY, MANY, Interval
from gradprune.passes.registry import rule
from gradprune.passes.transfer import as_dtype, axis, dtype_of, forgotten, remapped

Dims = int | Sequence[int] | None


def reduced(
    value: Value, dims: Dims, keepdim: bool, node: Node, keep: Callable[[Number], bool], needs: Needs = NO_NEEDS
) -> Value:
    """What holds where all the elements that go into a result equal one number that `keep` accepts as the result."""
    places = reduced_places(dims, len(value.dims))
    out: list[Group] = []
    for place, group in enumerate(value.dims):
        if place not in places:
            out.append(group)
        elif keepdim:
            out.append(())
    read = remapped(value, out, forgotten(value.dims[place] for place in places))

    def kept(known: Known | None) -> Known | None:
        number = exact(known.value, dtype_of(node)) if known is not None and keep(known.value) else None
        return Known(number, known.needs | needs) if known is not None and number is not None else None

    facts = {key: known for key, before in read.facts.items() if (known := kept(before)) is not None}
    return Value(read.dims, dtype_of(node), kept(read.const), facts, bounds=ANY, broken=value.broken, rows=read.rows)


def reduced_places(dims: Dims, rank: int) -> set[int]:
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return set(range(rank))
    return {axis(dim, rank) for dim in ([dims] if isinstance(dims, int) else dims)} if rank else set()


def _count(value: Value, dims: Dims) -> Size:
    places = reduced_places(dims, len(value.dims))
    return product(atom.size for place in places for atom in value.dims[place])


def _zero(number: Number) -> bool:
    return number == 0


def _any_number(number: Number) -> bool:
    return True


@rule("aten.sum.default", "aten.sum.dim_IntList")
def sum_(flow: Flow, node: Node, a: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    value = as_dtype(flow.value(a), dtype_of(node))
    count = flow.size_bounds(_count(value, dim))
    result = reduced(value, dim, keepdim, node, _zero)
    one_sign = value.bounds[0] >= 0 or value.bounds[1] <= 0
    return replace(
        result,
        bounds=_sum_bounds(value.bounds, count),
        notnan=value.notnan and (one_sign or _sum_fits(value, count[1])),
        reach=_sum_reach(flow, node, a, count[1]),
        broken=result.broken and count[0] >= 1,
    )


def _sum_fits(value: Value, count: float) -> bool:
    """Whether no partial sum in any order can overflow."""
    largest = intervals.magnitude(value.bounds) * 2 * min(count, MANY)
    return value.finite and intervals.is_finite(intervals.rounded((0.0, largest), value.dtype))


@rule("aten.nansum.default")
def nansum(flow: Flow, node: Node, a: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    return replace(reduced(as_dtype(flow.value(a), dtype_of(node)), dim, keepdim, node, _zero), broken=False)


def _sum_bounds(element: Interval, count: Interval) -> Interval:
    """Partial sums of numbers of one sign only grow; 2 covers the rounding of any order of additions."""
    low, high = element
    most = min(count[1], MANY)
    least = (low if count[0] >= 1 else 0.0) if low >= 0 else 2 * most * low
    largest = (high if count[0] >= 1 else 0.0) if high <= 0 else 2 * most * high
    return (least, largest)


def _sum_reach(flow: Flow, node: Node, a: Any, count: float) -> Reach | None:
    reach = flow.reach(a) if node in flow.backward else None
    return Reach(2 * min(count, MANY) * reach.limit, reach.needs) if reach is not None else None


@rule("aten.mean.default", "aten.mean.dim")
def mean(flow: Flow, node: Node, a: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    value = as_dtype(flow.value(a), dtype_of(node))
    count = _count(value, dim)
    nonempty = flow.nonempty(count, a)
    if nonempty is None:
        return replace(reduced(value, dim, keepdim, node, lambda _: False), broken=True)
    low, high = value.bounds
    most = min(flow.size_bounds(count)[1], MANY)
    fits = _sum_fits(value, most)
    bounds = (min(2 * low, 0.0), max(2 * high, 0.0)) if fits else (0.0 if low >= 0 else -math.inf, math.inf)
    result = reduced(value, dim, keepdim, node, _zero, nonempty)
    return replace(
        result,
        bounds=bounds,
        notnan=fits and not nonempty,
        reach=_mean_reach(_sum_reach(flow, node, a, most), nonempty),
        broken=result.broken and not nonempty,
    )


def _mean_reach(reach: Reach | None, nonempty: Needs) -> Reach | None:
    return Reach(reach.limit, reach.needs | nonempty) if reach is not None else None


@rule("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")
def extremum(flow: Flow, node: Node, a: Any, dim: Dims = None, keepdim: bool = False) -> Value:
    """An extremum of no element is an error, so there is one."""
    value = flow.value(a)
    reach = flow.reach(a) if node in flow.backward else None
    result = reduced(value, dim, keepdim, node, _any_number)
    return replace(result, bounds=value.bounds, notnan=value.notnan, reach=reach)


@rule("aten.aminmax.default")
def both_extrema(flow: Flow, node: Node, a: Any, *, dim: Dims = None, keepdim: bool = False) -> tuple[Value, Value]:
    value = flow.value(a)
    result = replace(reduced(value, dim, keepdim, node, _any_number), bounds=value.bounds, notnan=value.notnan)
    return result, result


@rule("aten.any.default", "aten.any.dim", "aten.any.dims")
def any_(flow: Flow, node: Node, a: Any, dim: Dims = None, keepdim: bool = False) -> Value:
    return replace(reduced(flow.value(a), dim, keepdim, node, lambda number: number == 0), broken=False)


@rule("aten.all.default", "aten.all.dim", "aten.all.dims")
def all_(flow: Flow, node: Node, a: Any, dim: Dims = None, keepdim: bool = False) -> Value:
    return replace(reduced(flow.value(a), dim, keepdim, node, lambda number: number != 0), broken=False)


@rule("aten.prod.default", "aten.prod.dim_int")
def prod(flow: Flow, node: Node, a: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    """A product of nothing is 1."""
    value = flow.value(a)
    nonempty = flow.nonempty(_count(value, dim), a)
    one = reduced(value, dim, keepdim, node, lambda number: number == 1)
    if nonempty is None:
        return one
    zero = reduced(value, dim, keepdim, node, _zero, nonempty)
    return replace(one, const=one.const or zero.const, facts={**one.facts, **zero.facts}, broken=False)


@rule("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def count_nonzero(flow: Flow, node: Node, a: Any, dim: Dims = None) -> Value:
    return replace(reduced(flow.value(a), dim, False, node, _zero), bounds=(0.0, MANY), broken=False)


@rule("aten.var.correction", "aten.std.correction")
def spread(flow: Flow, node: Node, a: Any, dim: Dims = None, *, correction: Any = 1, keepdim: bool = False) -> Value:
    return _spread(flow, node, a, dim, correction, keepdim)


def _spread(flow: Flow, node: Node, a: Any, dim: Dims, correction: Any, keepdim: bool) -> Value:
    """Variance or deviation: 0 / 0 where there are no more elements than the correction."""
    value = flow.value(a)
    correction = 1 if correction is None else correction
    low, high = flow.size_bounds(_count(value, dim))
    if high <= correction:
        return replace(reduced(value, dim, keepdim, node, lambda _: False), broken=True)
    enough = low > correction
    needs = NO_NEEDS if enough else flow.condition("finite", node)
    result = reduced(value, dim, keepdim, node, _zero, needs)
    return replace(result, bounds=(0.0, math.inf), broken=result.broken and enough)


@rule("aten.var_mean.correction", "aten.std_mean.correction")
def spread_and_mean(
    flow: Flow, node: Node, a: Any, dim: Dims = None, *, correction: Any = 1, keepdim: bool = False
) -> tuple[Value, Value]:
    return _spread(flow, node, a, dim, correction, keepdim), mean(flow, node, a, dim, keepdim)


@rule("aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim", "aten.norm.Scalar", "aten.norm.ScalarOpt_dim_dtype")
def norm(
    flow: Flow, node: Node, a: Any, order: Any = 2, dim: Dims = None, keepdim: bool = False, **_: Any
) -> Value | None:
    order = 2 if order is None else order
    if not isinstance(order, int | float) or order <= 0:
        return None
    value = as_dtype(flow.value(a), dtype_of(node))
    return replace(reduced(value, dim, keepdim, node, _zero), bounds=(0.0, math.inf))


@rule("aten.logsumexp.default")
def logsumexp(flow: Flow, node: Node, a: Any, dim: Dims, keepdim: bool = False) -> Value:
    return reduced(flow.value(a), dim, keepdim, node, lambda _: False)


@rule("aten._softmax.default", "aten._safe_softmax.default")
def softmax(flow: Flow, node: Node, a: Any, dim: int, *_: Any, **__: Any) -> Value:
    return _normalised(flow, node, a, dim, (0.0, 1.01))


@rule("aten._log_softmax.default")
def log_softmax(flow: Flow, node: Node, a: Any, dim: int, *_: Any, **__: Any) -> Value:
    return _normalised(flow, node, a, dim, (-math.inf, 0.01))


def _normalised(flow: Flow, node: Node, a: Any, dim: int, bounds: Interval) -> Value:
    """No number of the operand is one of the result; the rows are."""
    value = flow.value(a)
    place = axis(dim, len(value.dims))
    rows = remapped(value, value.dims, forgotten(value.dims[place : place + 1])).rows
    return Value(value.dims, dtype_of(node), bounds=bounds, rows=rows)
