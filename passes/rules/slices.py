"""Parts of tensors and tensors from parts: slice, select, split, cat, stack, pad."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gradprune.passes import intervals
from gradprune.passes.affine import (
    Affine,
    Atom,
    Group,
    Size,
    affine,
    group_of,
    groups_of,
    match_groups,
    plus,
    product,
    quotient,
    same_size,
    size_of,
    times,
)
from gradprune.passes.domain import (
    NO_NEEDS,
    Key,
    Reach,
    Value,
    joined_rows,
    met_facts,
    moved_facts,
    moved_rows,
)
from gradprune.passes.flow import Flow, Node
from gradprune.passes.registry import rule
from gradprune.passes.transfer import axis, dtype_of, forgotten, only_zeros, operands, remapped

END = sys.maxsize


def number_argument(argument: Any) -> Size | None:
    """An integer argument as a size: a number, or a node that holds a symbolic one."""
    meta = argument.meta.get("val") if isinstance(argument, Node) else argument
    return None if meta is None else size_of(meta)


def slice_start(flow: Flow, size: Size, result: Size, start: Any, end: Any, step: int) -> Size | None:
    """The first position that a slice reads, where that is certain for every size; None if it may be clamped."""
    start, end = number_argument(start), number_argument(end)
    start = 0 if start is None else start
    if isinstance(size, int) and isinstance(start, int):
        return min(max(start + size if start < 0 else start, 0), size)
    if flow.size_bounds(start)[0] >= 0:
        return start
    if not isinstance(start, int) or step != 1:
        return None
    to_end = end is None or (isinstance(end, int) and end >= END)
    taken = -start if to_end else end - start if isinstance(end, int) and end < 0 else None
    return plus(size, start) if taken is not None and same_size(result, taken) else None


@rule("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_(flow: Flow, node: Node, a: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    value = flow.value(a)
    place = axis(dim, len(value.dims))
    group = value.dims[place]
    size, result = extent(group), size_of(node.meta["val"].shape[place])
    if same_size(size, result) and step == 1:
        return value
    first = slice_start(flow, size, result, start, end, step)
    return _part(value, place, first, step, group_of(result))


def extent(group: Group) -> Size:
    return product(atom.size for atom in group)


def _part(value: Value, place: int, first: Size | None, step: int, new: Group) -> Value:
    """Positions ``first + step * new`` of a dimension."""
    dims = (*value.dims[:place], new, *value.dims[place + 1 :])
    group = value.dims[place]
    if len(group) == 1 and first is not None:
        return remapped(value, dims, {group[0]: affine(first, [(atom, step) for atom in new])})
    whole = _whole_rows(group, first, extent(new)) if first is not None and step == 1 else None
    if whole is None:
        return remapped(value, dims, forgotten([group]))
    leading, rows = whole
    dims = (*value.dims[:place], (*rows, *group[1:]), *value.dims[place + 1 :])
    return remapped(value, dims, {group[0]: affine(leading, [(atom, 1) for atom in rows])})


def _whole_rows(group: Group, first: Size, length: Size) -> tuple[Size, Group] | None:
    """A slice of a merged dimension that takes whole positions of its leading atom: the first, and a group for them."""
    if not group:
        return None
    width = product(atom.size for atom in group[1:])
    leading, count = 0 if first == 0 else quotient(first, width), quotient(length, width)
    return (leading, group_of(count)) if leading is not None and count is not None else None


@rule("aten.select.int", "aten.select_copy.int")
def select(flow: Flow, node: Node, a: Any, dim: int, index: Any) -> Value:
    value = flow.value(a)
    place = axis(dim, len(value.dims))
    first = _selected(flow, index, extent(value.dims[place]))
    dims = (*value.dims[:place], *value.dims[place + 1 :])
    return remapped(_part(value, place, first, 1, ()), dims)


def _selected(flow: Flow, index: Any, size: Size) -> Size | None:
    position = number_argument(index)
    if position is None:
        return None
    low, high = flow.size_bounds(position)
    return position if low >= 0 else plus(size, position) if high < 0 else None


@rule("aten.split.Tensor", "aten.split_copy.Tensor", "aten.unsafe_split.Tensor")
def split(flow: Flow, node: Node, a: Any, _: Any, dim: int = 0) -> tuple[Value, ...]:
    return _pieces(flow.value(a), node, dim)


@rule("aten.split_with_sizes.default", "aten.split_with_sizes_copy.default", "aten.unsafe_split_with_sizes.default")
def split_with_sizes(flow: Flow, node: Node, a: Any, _: Any, dim: int = 0) -> tuple[Value, ...]:
    return _pieces(flow.value(a), node, dim)


def _pieces(value: Value, node: Node, dim: int) -> tuple[Value, ...]:
    place = axis(dim, len(value.dims))
    pieces, first = [], 0
    for meta in node.meta["val"]:
        size = size_of(meta.shape[place])
        pieces.append(_part(value, place, first, 1, group_of(size)))
        first = plus(first, size)
    return tuple(pieces)


@rule("aten.unbind.int", "aten.unbind_copy.int")
def unbind(flow: Flow, node: Node, a: Any, dim: int = 0) -> tuple[Value, ...]:
    value = flow.value(a)
    place = axis(dim, len(value.dims))
    dims = (*value.dims[:place], *value.dims[place + 1 :])
    return tuple(remapped(_part(value, place, first, 1, ()), dims) for first in range(len(node.meta["val"])))


def mixed(flow: Flow, node: Node, parts: Sequence[tuple[Value, dict[Atom, Affine | None]]]) -> dict[str, Any]:
    """Facets of a tensor each of whose elements is one of some part's, the part's positions mapped to the result's."""
    values = [value for value, _ in parts]
    const, facts = met_facts((value.const, moved_facts(value.facts, mapping)) for value, mapping in parts)
    bounds = values[0].bounds
    for value in values:
        bounds = intervals.joined(bounds, value.bounds)
    reaches = [_own_reach(value) for value in values]
    reach = None
    if node in flow.backward and all(item is not None for item in reaches):
        known = [item for item in reaches if item is not None]
        reach = Reach(max(item.limit for item in known), NO_NEEDS.union(*(item.needs for item in known)))
    return {
        "const": const,
        "facts": facts,
        "bounds": bounds,
        "notnan": all(value.notnan for value in values),
        "reach": reach,
        "broken": all(value.broken for value in values),
        "rows": joined_rows(moved_rows(value.rows, mapping) for value, mapping in parts),
    }


def _own_reach(value: Value) -> Reach | None:
    if value.const is not None and intervals.is_finite((float(value.const.value),) * 2):
        return Reach(abs(value.const.value), value.const.needs)
    return Reach(intervals.magnitude(value.bounds)) if value.finite else value.reach


@rule("aten.cat.default")
def cat(flow: Flow, node: Node, tensors: Sequence[Any], dim: int = 0) -> Value:
    """Each part sits at its offset; a fact of one part survives where the others equal the same number anyway.

    Parts of one size may be as well positions of a dimension of its own, as those of a stack are.
    """
    joined = [tensor for tensor in tensors if not _is_legacy_empty(tensor, node)]
    values = operands(flow, dtype_of(node), *joined)
    place = axis(dim, len(node.meta["val"].shape))
    result = _side_by_side(flow, node, values, place)
    if result.facts or result.const is not None or len(values) < 2:
        return result
    if not all(
        value.dims[place] and same_size(extent(value.dims[place]), extent(values[0].dims[place])) for value in values
    ):
        return result
    return _stacked(flow, node, values, place)


def _stacked(flow: Flow, node: Node, values: Sequence[Value], place: int) -> Value:
    outer, first = group_of(len(values)), values[0].dims
    parts: list[tuple[Value, dict[Atom, Affine | None]]] = []
    for value in values:
        mapping: dict[Atom, Affine | None] = {}
        for group, target in zip(value.dims, first):
            match_groups(group, target, mapping)
        parts.append((_running(value, outer, len(parts)), mapping))
    dims = (*first[:place], (*outer, *first[place]), *first[place + 1 :])
    return Value(dims, dtype_of(node), **mixed(flow, node, parts))


def _side_by_side(flow: Flow, node: Node, values: Sequence[Value], place: int) -> Value:
    dims = list(groups_of(node.meta["val"].shape))
    parts, offset = [], 0
    for value in values:
        mapping: dict[Atom, Affine | None] = {}
        for position, (group, target) in enumerate(zip(value.dims, dims)):
            if position == place:
                mapping.update(shifted_into(group, target, offset))
            else:
                match_groups(group, target, mapping)
        parts.append((value if value.dims[place] else _running(value, dims[place], offset), mapping))
        offset = plus(offset, extent(value.dims[place]))
    return Value(tuple(dims), dtype_of(node), **mixed(flow, node, parts))


def _is_legacy_empty(tensor: Any, node: Node) -> bool:
    """torch.cat skips tensors of shape (0,) among others of higher rank."""
    return tensor.meta["val"].dim() != node.meta["val"].dim()


def shifted_into(group: Group, target: Group, offset: Size, step: int = 1) -> dict[Atom, Affine | None]:
    """The mapping of a part that sits at ``offset + step * position`` of the dimension `target`."""
    if len(group) == 1 and len(target) == 1 and step == 1:
        return {group[0]: affine(times(-1, offset), [(target[0], 1)])}
    return dict(forgotten([group]))


@rule("aten.stack.default")
def stack(flow: Flow, node: Node, tensors: Sequence[Any], dim: int = 0) -> Value:
    dims = groups_of(node.meta["val"].shape)
    place = axis(dim, len(dims))
    kept = (*dims[:place], *dims[place + 1 :])
    parts: list[tuple[Value, dict[Atom, Affine | None]]] = []
    for tensor in tensors:
        mapping: dict[Atom, Affine | None] = {}
        value = flow.value(tensor)
        for group, target in zip(value.dims, kept):
            match_groups(group, target, mapping)
        parts.append((_running(value, dims[place], len(parts)), mapping))
    return Value(dims, dtype_of(node), **mixed(flow, node, parts))


def _running(value: Value, group: Group, offset: Size) -> Value:
    """A part that takes only position `offset` of the dimension `group`: there, a constant index is also one that runs
    along with the dimension, as those of the parts beside it may."""
    if len(group) != 1:
        return value

    def run(index: Any) -> Any:
        constant = isinstance(index, Affine) and not index.terms
        return affine(plus(index.offset, times(-1, offset)), [(group[0], 1)]) if constant else index

    facts = dict(value.facts)
    for (factor, indices), known in value.facts.items():
        for place in range(len(indices)):
            facts.setdefault(Key(factor, (*indices[:place], run(indices[place]), *indices[place + 1 :])), known)
    return replace(value, facts=facts, rows=run(value.rows))


@rule("aten.constant_pad_nd.default")
def pad(flow: Flow, node: Node, a: Any, padding: Sequence[Any], number: Any = 0) -> Value:
    """Positions beside the operand hold `number`; a negative padding cuts."""
    value, filler = flow.value(a), flow.literal(number, dtype_of(node))
    dims = list(groups_of(node.meta["val"].shape))
    mapping: dict[Atom, Affine | None] = {}
    for back, (group, target) in enumerate(zip(reversed(value.dims), reversed(dims))):
        before = number_argument(padding[2 * back]) if 2 * back < len(padding) else 0
        touched = 2 * back < len(padding) and any(part != 0 for part in padding[2 * back : 2 * back + 2])
        if touched and before is not None:
            mapping.update(shifted_into(group, target, before))
        else:
            match_groups(group, target, mapping)
    return Value(tuple(dims), dtype_of(node), **mixed(flow, node, [(value, mapping), (filler, {})]))


@rule("aten.tril.default", "aten.triu.default")
def triangle(flow: Flow, node: Node, a: Any, *_: Any) -> Value:
    """Elements are kept or set to zero."""
    value = flow.value(a)
    const = value.const if value.is_zero() else None
    bounds = intervals.joined(value.bounds, (0.0, 0.0))
    return replace(value, const=const, facts=only_zeros(value.facts), bounds=bounds, broken=False)
