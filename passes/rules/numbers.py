"""Conversions: dtype and device changes, tensors to Python numbers, sizes, and numbers that depend on data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from gradprune.passes.domain import Known, Number, Value
from gradprune.passes.flow import Flow, Node
from gradprune.passes.intervals import Interval, range_of
from gradprune.passes.registry import rule
from gradprune.passes.transfer import dtype_of, forgotten, pointwise, remapped


@rule("aten._to_copy.default", "prims.convert_element_type.default")
def convert(flow: Flow, node: Node, a: Any, *_: Any, **__: Any) -> Value:
    x, dtype = flow.value(a), dtype_of(node)
    return converted(node, x, dtype, reach=flow.reach(a) if node in flow.backward else None)


def converted(node: Node, x: Value, dtype: torch.dtype | None, reach: Any = None) -> Value:
    if x.dtype == dtype:
        return replace(x, reach=reach)
    to_float = dtype is not None and dtype.is_floating_point
    bounds, faithful = _converted_bounds(x, dtype)
    return pointwise(
        node,
        [x],
        lambda p: _converted_known(p, dtype),
        bounds=bounds,
        notnan=x.notnan and to_float,
        reach=reach if faithful else None,
        broken=x.broken and to_float,
    )


def _converted_known(known: Known | None, dtype: torch.dtype | None) -> Known | None:
    if known is None or dtype is None or dtype.is_complex:
        return None
    value: Number = known.value
    if dtype == torch.bool:
        value = value != 0
    elif not dtype.is_floating_point:
        if math.isinf(value):
            return None
        value = math.trunc(value)
    return Known(value, known.needs)


def _converted_bounds(x: Value, dtype: torch.dtype | None) -> tuple[Interval, bool]:
    """Bounds, and whether a limit of the magnitude still holds. A float out of an integer's range becomes anything."""
    if dtype is None or dtype == torch.bool or x.dtype is None or x.dtype.is_complex:
        return range_of(dtype), False
    if dtype.is_floating_point or not x.dtype.is_floating_point:
        return x.bounds, True
    low, high = range_of(dtype)
    if not x.notnan or x.bounds[0] < low or x.bounds[1] > high:
        return (low, high), False
    return (math.trunc(x.bounds[0]), math.trunc(x.bounds[1])), True


@rule("aten._local_scalar_dense.default")
def to_number(flow: Flow, node: Node, a: Any) -> Value:
    """``tensor.item()``: the number is the element, and one of its dtype."""
    value = flow.value(a)
    return remapped(value, (), forgotten(value.dims))


@rule("torch.sym_float", "torch.sym_int", "builtins.float", "builtins.int", "math.fabs")
def number_of_number(flow: Flow, node: Node, a: Any) -> Value | None:
    if "fabs" in str(node.target):
        return None
    return converted(node, flow.value(a), dtype_of(node))


@rule("operator.getitem")
def item_of(flow: Flow, node: Node, several: Any, position: Any) -> Any:
    """One result of an operator that has several; already settled."""
    return flow.values[several][position]
