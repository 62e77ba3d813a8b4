"""Sorting, selecting by rank, and running sums along one dimension."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gradprune.passes.affine import group_of, product, size_of
from gradprune.passes.domain import Known, Number, Value, unknown
from gradprune.passes.flow import Flow, Node
from gradprune.passes.intervals import ANY
from gradprune.passes.registry import rule
from gradprune.passes.rules.reductions import Dims, reduced
from gradprune.passes.rules.views import moved_within
from gradprune.passes.transfer import as_dtype, axis, dtype_of, forgotten, remapped


@rule("aten.sort.default", "aten.sort.stable")
def sort(flow: Flow, node: Node, a: Any, *arguments: Any, dim: int | None = None, **_: Any) -> Any:
    """The values along a dimension in another order; where each comes from is not known."""
    value = flow.value(a)
    asked = [argument for argument in arguments if type(argument) is int]
    place = axis(dim if dim is not None else asked[0] if asked else -1, len(value.dims))
    ordered = moved_within(value, {place} if value.dims else set())
    return (ordered, _positions(ordered, node, 1))


def _positions(like: Value, node: Node, result: int) -> Value:
    """Indices that depend on what `like` depends on."""
    dtype = node.meta["val"][result].dtype
    return replace(unknown(like.dims, dtype), rows=like.rows)


@rule("aten.topk.default")
def topk(flow: Flow, node: Node, a: Any, k: Any, dim: int = -1, *_: Any) -> tuple[Value, Value]:
    value = flow.value(a)
    place = axis(dim, len(value.dims))
    dims = list(value.dims)
    if dims:
        dims[place] = group_of(size_of(node.meta["val"][0].shape[place]))
    best = remapped(value, dims, forgotten(value.dims[place : place + 1]))
    return best, _positions(best, node, 1)


@rule(
    "aten.max.dim",
    "aten.min.dim",
    "aten.mode.default",
    "aten.kthvalue.default",
)
def ranked(flow: Flow, node: Node, a: Any, *arguments: Any, **named: Any) -> tuple[Value, Value]:
    """One of the elements along a dimension, and its index.

    A median along a dimension has no rule: where that was expanded, the CPU's kernel reads memory that is not the
    tensor's (torch 2.13).
    """
    if "kthvalue" in str(node.target):
        arguments = arguments[1:]
    dim = arguments[0] if arguments else named.get("dim", -1)
    keepdim = arguments[1] if len(arguments) > 1 else named.get("keepdim", False)
    value = flow.value(a)
    result = reduced(value, dim, keepdim, node, lambda _: True)
    result = replace(result, bounds=value.bounds, notnan=value.notnan)
    return result, _positions(result, node, 1)


@rule("aten.median.default", "aten.nanmedian.default")
def median(flow: Flow, node: Node, a: Any) -> Value:
    """NaN for an empty tensor."""
    value = flow.value(a)
    size = reduced_size(value)
    nonempty = flow.nonempty(size, a)
    if nonempty is None:
        return replace(reduced(value, None, False, node, lambda _: False), broken=True)
    return replace(reduced(value, None, False, node, lambda _: True, nonempty), bounds=value.bounds, broken=False)


def reduced_size(value: Value) -> Any:
    return product(atom.size for group in value.dims for atom in group)


@rule("aten.argmax.default", "aten.argmin.default")
def argument_of_extremum(flow: Flow, node: Node, a: Any, dim: Dims = None, keepdim: bool = False) -> Value:
    value = reduced(flow.value(a), dim, keepdim, node, lambda _: False)
    return replace(value, bounds=(0.0, math.inf), broken=False)


@rule(
    "aten.cumsum.default",
    "aten.cumprod.default",
    "aten.cummax.default",
    "aten.cummin.default",
    "aten.logcumsumexp.default",
)
def running(flow: Flow, node: Node, a: Any, dim: int, **_: Any) -> Any:
    """Zero where all elements up to there are zero; a running extremum of one number is that number."""
    name = str(node.target)
    value = flow.value(a)
    several = isinstance(node.meta["val"], tuple | list)
    value = value if several else as_dtype(value, dtype_of(node))
    place = axis(dim, len(value.dims))
    read = remapped(value, value.dims, forgotten(value.dims[place : place + 1]))
    keep: Callable[[Number], bool] = (lambda number: True) if several else (lambda number: number == 0)
    if "logcumsumexp" in name:
        keep = lambda _: False  # noqa: E731

    def kept(known: Known | None) -> Known | None:
        return known if known is not None and keep(known.value) else None

    facts = {key: known for key, known in read.facts.items() if keep(known.value)}
    result = replace(read, const=kept(read.const), facts=facts, reach=None)
    if several:
        return result, _positions(result, node, 1)
    low = 0.0 if value.bounds[0] >= 0 and "log" not in name else -math.inf
    return replace(result, dtype=dtype_of(node), bounds=(low, ANY[1]), notnan=False)
