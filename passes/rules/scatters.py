"""Writing at positions that are data: each result element is one of the target's or made from the source's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gradprune.passes.affine import Affine, Atom, groups_of, match_groups, size_of
from gradprune.passes.domain import Known, Reach, Value, joined_rows
from gradprune.passes.flow import Flow, Node
from gradprune.passes.intervals import ANY, MANY
from gradprune.passes.registry import rule
from gradprune.passes.rules.choice import picked_by_condition
from gradprune.passes.rules.gathers import index_mask, same_positions
from gradprune.passes.rules.numbers import converted
from gradprune.passes.rules.slices import extent, mixed, shifted_into, slice_start
from gradprune.passes.transfer import (
    also_reading,
    axis,
    combined,
    dtype_of,
    forgotten,
    only_zeros,
    operands,
    read_at,
    remapped,
    shape_of,
)

Parts = list[tuple[Value, dict[Atom, Affine | None]]]


def _replaced(flow: Flow, node: Node, parts: Parts, *indices: Any) -> Value:
    """Each element is one of some part's."""
    result = Value(parts[0][0].dims, dtype_of(node), **mixed(flow, node, parts))
    return also_reading(flow, result, *indices)


def _accumulated(flow: Flow, node: Node, parts: Parts, *indices: Any) -> Value:
    """Each element is a sum of some of the parts' elements: zero where all of them are."""
    result = _replaced(flow, node, parts, *indices)
    zero = result.const if result.is_zero() else None
    reach = result.reach
    summed = Reach(2 * MANY * reach.limit, reach.needs) if reach is not None else None
    return replace(result, const=zero, facts=only_zeros(result.facts), bounds=ANY, notnan=False, reach=summed)


@rule("aten.scatter.src", "aten.scatter.value")
def scatter(flow: Flow, node: Node, a: Any, dim: int, index: Any, source: Any) -> Value:
    return _aligned_rows(flow, _replaced(flow, node, _scatter_parts(flow, node, a, dim, index, source)), index, dim)


def _scatter_parts(flow: Flow, node: Node, a: Any, dim: int, index: Any, source: Any) -> Parts:
    value, written = operands(flow, dtype_of(node), a, source)
    place = axis(dim, len(value.dims))
    mapping = same_positions(written.dims, value.dims, {place}) if written.dims else {}
    return [(remapped(value, value.dims), forgotten(value.dims[place : place + 1])), (written, mapping)]


def _aligned_rows(flow: Flow, result: Value, index: Any, dim: int) -> Value:
    """`result`, that depends on `index` at the same positions in every dimension but `dim`."""
    positions = flow.value(index)
    mapping = same_positions(positions.dims, result.dims, {axis(dim, len(positions.dims))})
    return replace(result, rows=joined_rows([result.rows, remapped(positions, result.dims, mapping).rows]))


@rule("aten.scatter_add.default")
def scatter_add(flow: Flow, node: Node, a: Any, dim: int, index: Any, source: Any) -> Value:
    return _aligned_rows(flow, _accumulated(flow, node, _scatter_parts(flow, node, a, dim, index, source)), index, dim)


@rule("aten.scatter_reduce.two", "aten.scatter.reduce", "aten.scatter.value_reduce")
def scatter_reduce(
    flow: Flow, node: Node, a: Any, dim: int, index: Any, source: Any, reduce: str = "sum", **_: Any
) -> Value | None:
    if reduce not in ("sum", "add", "amax", "amin", "mean", "prod", "multiply"):
        return None
    return _aligned_rows(flow, _accumulated(flow, node, _scatter_parts(flow, node, a, dim, index, source)), index, dim)


@rule("aten.index_add.default", "aten.index_reduce.default")
def index_add(flow: Flow, node: Node, a: Any, dim: int, index: Any, source: Any, *mode: Any, **_: Any) -> Value | None:
    if mode and mode[0] != "mean":
        return None
    return _accumulated(flow, node, _scatter_parts(flow, node, a, dim, index, source), index)


@rule("aten.index_copy.default")
def index_copy(flow: Flow, node: Node, a: Any, dim: int, index: Any, source: Any) -> Value:
    return _replaced(flow, node, _scatter_parts(flow, node, a, dim, index, source), index)


@rule("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def index_fill(flow: Flow, node: Node, a: Any, dim: int, index: Any, number: Any) -> Value:
    return _replaced(flow, node, _scatter_parts(flow, node, a, dim, index, number), index)


@rule("aten.slice_scatter.default")
def slice_scatter(
    flow: Flow, node: Node, a: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    return _with_slice(flow, node, flow.value(a), source, dim, start, end, step)


@rule("aten.slice_backward.default")
def slice_backward(flow: Flow, node: Node, gradient: Any, _: Any, dim: int, start: Any, end: Any, step: int) -> Value:
    return _with_slice(flow, node, zeros_like_node(flow, node), gradient, dim, start, end, step)


def zeros_like_node(flow: Flow, node: Node) -> Value:
    (zero,) = operands(flow, dtype_of(node), 0)
    return replace(zero, dims=groups_of(shape_of(node)))


def _with_slice(flow: Flow, node: Node, value: Value, source: Any, dim: int, start: Any, end: Any, step: int) -> Value:
    (written,) = operands(flow, dtype_of(node), source)
    place = axis(dim, len(value.dims))
    whole, part = extent(value.dims[place]), size_of(source.meta["val"].shape[place])
    first = slice_start(flow, whole, part, start, end, step)
    mapping: dict[Atom, Affine | None] = {}
    for position, (group, target) in enumerate(zip(written.dims, value.dims)):
        if position == place and first is not None:
            mapping.update(shifted_into(group, target, first, step))
        elif position == place:
            mapping.update(forgotten([group]))
        else:
            match_groups(group, target, mapping)
    return _replaced(flow, node, [(value, {}), (written, mapping)])


@rule("aten.select_scatter.default")
def select_scatter(flow: Flow, node: Node, a: Any, source: Any, dim: int, index: Any) -> Value:
    return _with_selected(flow, node, flow.value(a), source, dim)


@rule("aten.select_backward.default")
def select_backward(flow: Flow, node: Node, gradient: Any, _: Any, dim: int, index: Any) -> Value:
    return _with_selected(flow, node, zeros_like_node(flow, node), gradient, dim)


def _with_selected(flow: Flow, node: Node, value: Value, source: Any, dim: int) -> Value:
    (written,) = operands(flow, dtype_of(node), source)
    place = axis(dim, len(value.dims))
    mapping: dict[Atom, Affine | None] = {}
    for group, target in zip(written.dims, (*value.dims[:place], *value.dims[place + 1 :])):
        match_groups(group, target, mapping)
    return _replaced(flow, node, [(value, {}), (written, mapping)])


@rule("aten.diagonal_scatter.default", "aten.as_strided_scatter.default")
def diagonal_scatter(flow: Flow, node: Node, a: Any, source: Any, *_: Any) -> Value:
    value, written = operands(flow, dtype_of(node), a, source)
    return _replaced(flow, node, [(value, forgotten(value.dims)), (written, forgotten(written.dims))])


@rule("aten.copy.default")
def copy(flow: Flow, node: Node, a: Any, source: Any, *_: Any, **__: Any) -> Value:
    """The source, broadcast to the target's shape and dtype."""
    target, written = flow.value(a), flow.value(source)
    mapping: dict[Atom, Affine | None] = {}
    for group, other in zip(reversed(written.dims), reversed(target.dims)):
        match_groups(group, other, mapping)
    return converted(node, remapped(written, target.dims, mapping), dtype_of(node))


@rule("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(flow: Flow, node: Node, a: Any, indices: Sequence[Any], source: Any, accumulate: bool = False) -> Value:
    value, written = operands(flow, dtype_of(node), a, source)
    given = [index for index in indices if index is not None]
    anywhere = (written, forgotten(written.dims))
    parts: Parts = [(value, {}), anywhere]
    result = (_accumulated if accumulate else _replaced)(flow, node, parts, *given)
    if len(indices) != 1 or given[0].meta["val"].dtype != torch.bool:
        return result
    mask = index_mask(flow.value(given[0]), value.dims)
    return _or_masked(result, _put_where(value, mask, written, accumulate))


def _or_masked(result: Value, masked: Value) -> Value:
    facts = {**read_at(masked, result.dims).facts, **result.facts}
    return replace(result, const=result.const or masked.const, facts=facts)


def _put_where(value: Value, mask: Value, written: Value, accumulate: bool) -> Value:
    """What follows from one boolean mask: the target where the mask is false."""
    shape = [extent(group) for group in value.dims]
    source = remapped(written, (), forgotten(written.dims))

    def combine(condition: Known | None, new: Known | None, old: Known | None) -> Known | None:
        if accumulate:
            new = Known(old.value + new.value, old.needs | new.needs) if old is not None and new is not None else None
        return picked_by_condition(condition, new, old)

    return combined(value.dtype, shape, [mask, source, value], combine)


@rule("aten.masked_scatter.default")
def masked_scatter(flow: Flow, node: Node, a: Any, mask: Any, source: Any) -> Value:
    value, written = operands(flow, dtype_of(node), a, source)
    anywhere = (written, forgotten(written.dims))
    result = _replaced(flow, node, [(value, {}), anywhere], mask)
    return _or_masked(result, _put_where(value, flow.value(mask), written, accumulate=False))


@rule("aten.masked_scatter_backward.default")
def masked_scatter_backward(flow: Flow, node: Node, gradient: Any, mask: Any, *_: Any) -> Value:
    (written,) = operands(flow, dtype_of(node), gradient)
    zero = zeros_like_node(flow, node)
    return _replaced(flow, node, [(zero, {}), (written, forgotten(written.dims))], mask)
