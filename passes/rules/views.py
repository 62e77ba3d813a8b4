"""Operators that only rearrange elements: a result element is one operand element, at a known or unknown position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradprune.passes.affine import (
    Affine,
    Atom,
    Group,
    Size,
    affine,
    group_of,
    moved,
    plus,
    product,
    quotient,
    same_size,
    size_of,
    times,
)
from gradprune.passes.domain import Value
from gradprune.passes.flow import Flow, Node
from gradprune.passes.registry import rule
from gradprune.passes.transfer import axis, forgotten, remapped, scattered


@rule(
    "aten.alias.default",
    "aten.alias_copy.default",
    "aten.detach.default",
    "aten.detach_copy.default",
    "aten.clone.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
    "prims.device_put.default",
)
def same(flow: Flow, node: Node, a: Any, *_: Any, **__: Any) -> Value:
    return flow.value(a)


@rule("aten.unsqueeze.default", "aten.unsqueeze_copy.default")
def unsqueeze(flow: Flow, node: Node, a: Any, dim: int) -> Value:
    value = flow.value(a)
    place = dim % (len(value.dims) + 1)
    return remapped(value, (*value.dims[:place], (), *value.dims[place:]))


@rule(
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.squeeze_copy.default",
    "aten.squeeze_copy.dim",
    "aten.squeeze_copy.dims",
)
def squeeze(flow: Flow, node: Node, a: Any, dim: int | Sequence[int] | None = None) -> Value:
    value = flow.value(a)
    rank = len(value.dims)
    asked = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    places = {axis(d, rank) for d in asked}
    return remapped(value, [group for place, group in enumerate(value.dims) if place not in places or group])


@rule("aten.expand.default", "aten.expand_copy.default")
def expand(flow: Flow, node: Node, a: Any, *_: Any, **__: Any) -> Value:
    value = flow.value(a)
    shape = node.meta["val"].shape
    new = len(shape) - len(value.dims)
    old = ((),) * new + value.dims
    return remapped(value, [group or group_of(size_of(size)) for group, size in zip(old, shape)])


@rule("aten.permute.default", "aten.permute_copy.default")
def permute(flow: Flow, node: Node, a: Any, order: Sequence[int]) -> Value:
    value = flow.value(a)
    return remapped(value, [value.dims[place] for place in order])


@rule("aten.transpose.int", "aten.transpose_copy.int", "aten.t.default", "aten.t_copy.default")
def transpose(flow: Flow, node: Node, a: Any, first: int = 0, second: int = 1) -> Value:
    value = flow.value(a)
    dims = list(value.dims)
    if len(dims) >= 2 or "transpose" in str(node.target):
        first, second = axis(first, len(dims)), axis(second, len(dims))
        if dims:
            dims[first], dims[second] = dims[second], dims[first]
    return remapped(value, dims)


@rule(
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.view_copy.default",
    "aten._reshape_alias.default",
    "aten._reshape_copy.default",
)
def view(flow: Flow, node: Node, a: Any, *_: Any) -> Value:
    value = flow.value(a)
    shape = [size_of(size) for size in node.meta["val"].shape]
    regrouped = _regroup([atom for group in value.dims for atom in group], shape)
    if regrouped is None:
        return scattered(value, node)
    dims, splits = regrouped
    return remapped(value, dims, splits)


def _regroup(atoms: list[Atom], shape: Sequence[Size]) -> tuple[list[Group], dict[Atom, Affine | None]] | None:
    """The atoms in order as dimensions of the given sizes, splitting an atom where needed; None if they do not fit."""
    queue = list(atoms)
    splits: dict[Atom, Affine | None] = {}
    dims: list[Group] = []
    for size in shape:
        if isinstance(size, int) and size == 1:
            dims.append(())
            continue
        taken = _take(queue, size, splits)
        if taken is None:
            return None
        dims.append(taken)
    return (dims, splits) if not queue else None


def _take(queue: list[Atom], size: Size, splits: dict[Atom, Affine | None]) -> Group | None:
    """Leading atoms of the queue whose product is `size`; the last of them may have to be split."""
    group: list[Atom] = []
    extent: Size = 1
    while not same_size(extent, size):
        rest = quotient(size, extent)
        if rest is None or not queue:
            return None
        atom = queue.pop(0)
        if quotient(rest, atom.size) is not None:
            group.append(atom)
            extent = times(extent, atom.size)
            continue
        inner = quotient(atom.size, rest)
        if inner is None:
            return None
        high, low = Atom(rest), Atom(inner)
        _split(splits, atom, affine(0, [(high, inner), (low, 1)]))
        queue.insert(0, low)
        group.append(high)
        extent = times(extent, rest)
    return tuple(group)


def _split(splits: dict[Atom, Affine | None], atom: Atom, parts: Affine) -> None:
    """Record that `atom` is `parts`, also where it is itself a part of an atom that was split before."""
    for earlier, index in splits.items():
        changed = moved(index, {atom: parts}) if index is not None else None
        splits[earlier] = changed if isinstance(changed, Affine) else None
    splits[atom] = parts


@rule("aten.flip.default")
def flip(flow: Flow, node: Node, a: Any, dims: Sequence[int]) -> Value:
    value = flow.value(a)
    groups = list(value.dims)
    mapping: dict[Atom, Affine | None] = {}
    for place in {axis(dim, len(groups)) for dim in dims}:
        group = groups[place]
        if len(group) == 1:
            atom = Atom(group[0].size)
            groups[place] = (atom,)
            mapping[group[0]] = affine(plus(group[0].size, -1), [(atom, -1)])
        elif group:
            groups[place] = group_of(product(atom.size for atom in group))
            mapping.update(forgotten([group]))
    return remapped(value, groups, mapping)


@rule("aten.roll.default")
def roll(flow: Flow, node: Node, a: Any, shifts: Any, dims: Sequence[int] = ()) -> Value:
    """Each element comes from some position of the rolled dimensions."""
    value = flow.value(a)
    places = {axis(dim, len(value.dims)) for dim in dims} if dims else set(range(len(value.dims)))
    return moved_within(value, places)


def moved_within(value: Value, places: set[int]) -> Value:
    """Elements moved to unknown positions within the dimensions `places`; other dimensions as they were."""
    dims = [
        group_of(product(atom.size for atom in group)) if place in places else group
        for place, group in enumerate(value.dims)
    ]
    return remapped(value, dims, forgotten(value.dims[place] for place in places))


@rule("aten.diagonal.default", "aten.diagonal_copy.default", "aten.unfold.default", "aten.unfold_copy.default")
def diagonal(flow: Flow, node: Node, a: Any, *_: Any, **__: Any) -> Value:
    return scattered(flow.value(a), node)


@rule("aten.repeat.default")
def repeat(flow: Flow, node: Node, a: Any, repeats: Sequence[Any]) -> Value:
    value = flow.value(a)
    old = ((),) * (len(repeats) - len(value.dims)) + value.dims
    dims: list[Group] = []
    lost: list[Group] = []
    for group, size in zip(old, node.meta["val"].shape):
        whole = size_of(size)
        if group and same_size(product(atom.size for atom in group), whole):
            dims.append(group)
        else:
            dims.append(group_of(whole))
            lost.append(group)
    return remapped(value, dims, forgotten(lost))
