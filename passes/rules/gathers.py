"""Reading at positions that are data: gather, index, index_select, embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gradprune.passes.affine import (
    Affine,
    Atom,
    Group,
    flattened,
    group_of,
    groups_of,
    looked,
    match_groups,
    product,
    same_size,
    size_of,
)
from gradprune.passes.domain import Known, Value, joined_rows, moved_facts, moved_rows
from gradprune.passes.flow import Flow, Node
from gradprune.passes.registry import rule
from gradprune.passes.rules.choice import picked_by_condition
from gradprune.passes.transfer import also_reading, axis, combined, forgotten, remapped, scattered


@rule("aten.gather.default")
def gather(flow: Flow, node: Node, a: Any, dim: int, index: Any, **_: Any) -> Value:
    """``a[i, index[i, j]]``: every dimension but `dim` is read at the result's own index."""
    value, positions = flow.value(a), flow.value(index)
    place = axis(dim, len(value.dims))
    mapping = same_positions(value.dims, positions.dims, {place})
    rows = joined_rows([moved_rows(value.rows, mapping), positions.rows])
    if value.dims:
        mapping |= looked(flow.first_equal(index), tuple(map(flattened, positions.dims)), value.dims[place])
    return replace(remapped(value, positions.dims, mapping), rows=rows)


def same_positions(dims: Sequence[Group], target: Sequence[Group], unknown: set[int]) -> dict[Atom, Affine | None]:
    """The mapping of atoms that are read at the same index of `target`, which may be smaller or larger."""
    mapping: dict[Atom, Affine | None] = {}
    for place, (group, other) in enumerate(zip(dims, target)):
        if place in unknown:
            mapping.update(forgotten([group]))
        elif len(group) == 1 and len(other) <= 1:
            mapping[group[0]] = Affine(0, tuple((atom, 1) for atom in other))
        else:
            match_groups(group, other, mapping)
    return mapping


@rule("aten.index_select.default")
def index_select(flow: Flow, node: Node, a: Any, dim: int, index: Any) -> Value:
    value = flow.value(a)
    place = axis(dim, len(value.dims))
    dims = list(value.dims)
    if dims:
        dims[place] = group_of(size_of(node.meta["val"].shape[place]))
    at = tuple(map(flattened, dims[place : place + 1] * index.meta["val"].dim()))
    return _read_at(flow, value, dims, forgotten(value.dims[place : place + 1]), [(index, at, value.dims[place])])


def _read_at(
    flow: Flow,
    value: Value,
    dims: Sequence[Group],
    mapping: dict[Atom, Affine | None],
    reads: Sequence[tuple[Node, tuple[Affine, ...], Group]],
) -> Value:
    """`value` read where the tensors of `reads` say, each at `at` for one dimension: facts stay those of that place.

    No row is known to be read: which it is depends on the indices.
    """
    read = remapped(value, dims, mapping)
    places = {
        atom: index for node, at, group in reads for atom, index in looked(flow.first_equal(node), at, group).items()
    }
    facts = moved_facts(value.facts, {**mapping, **places})
    return also_reading(flow, replace(read, facts=facts), *(node for node, _, _ in reads))


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index_(flow: Flow, node: Node, a: Any, indices: Sequence[Any]) -> Value:
    value = flow.value(a)
    shape = node.meta["val"].shape
    dims, mapping, reads = indexed_dims(value.dims, indices, groups_of(shape))
    read = _read_at(flow, value, dims, mapping, reads)
    read = also_reading(flow, read, *(index for index in indices if index is not None))
    selected = _known_where_selected(flow, node, value, indices)
    return replace(read, const=selected) if selected is not None and read.const is None else read


def indexed_dims(
    dims: Sequence[Group], indices: Sequence[Any], result: Sequence[Group]
) -> tuple[tuple[Group, ...], dict[Atom, Affine | None], list[tuple[Node, tuple[Affine, ...], Group]]]:
    """Dims of ``a[indices]`` given fresh groups of its shape, where the atoms of `a` are in it, and what is read where.

    Dimensions that are not indexed stay; the indexed ones give way to the broadcast index, in place if they are
    adjacent, else in front. A boolean index takes as many dimensions as it has, and gives one.
    """
    taken: list[bool] = []
    for index in indices:
        taken += [index is not None] * (index.meta["val"].dim() if _is_mask(index) else 1)
    taken += [False] * (len(dims) - len(taken))
    kept = [place for place, gone in enumerate(taken) if not gone]
    gone = [place for place, gone in enumerate(taken) if gone]
    inserted = len(result) - len(kept)
    adjacent = bool(gone) and gone == list(range(gone[0], gone[-1] + 1)) and _adjacent_indices(indices)
    front = gone[0] if adjacent else 0
    places = [*range(front), *range(front + inserted, len(result))]
    out = list(result)
    for place, source in zip(places, kept):
        out[place] = dims[source]
    reads = []
    if not any(map(_is_mask, indices)):
        inside = out[front : front + inserted]
        for place, index in enumerate(indices):
            at = None if index is None else _at(index, inside)
            reads += [(index, at, dims[place])] if at is not None else []
    return tuple(out), forgotten(dims[place] for place in gone), reads


def _is_mask(index: Node | None) -> bool:
    return index is not None and index.meta["val"].dtype in (torch.bool, torch.uint8)


def _at(index: Node, inside: Sequence[Group]) -> tuple[Affine, ...] | None:
    """Where in a tensor of indices each result is looked up; None where sizes of data may be broadcast."""
    sizes = [size_of(size) for size in index.meta["val"].shape]
    groups = inside[len(inside) - len(sizes) :]
    if not all(size == 1 or same_size(size, product(a.size for a in group)) for size, group in zip(sizes, groups)):
        return None
    return tuple(Affine(0) if size == 1 else flattened(group) for size, group in zip(sizes, groups))


def _adjacent_indices(indices: Sequence[Any]) -> bool:
    given = [position for position, index in enumerate(indices) if index is not None]
    return given == list(range(given[0], given[-1] + 1))


def _known_where_selected(flow: Flow, node: Node, value: Value, indices: Sequence[Any]) -> Known | None:
    """Zero, if the elements that one boolean mask selects are all zero: if ``where(mask, value, 0)`` is zero."""
    if len(indices) != 1 or indices[0] is None or indices[0].meta["val"].dtype != torch.bool:
        return None
    mask = index_mask(flow.value(indices[0]), value.dims)
    shape = [product(atom.size for atom in group) for group in value.dims]
    picked = combined(value.dtype, shape, [mask, value, flow.literal(0, value.dtype)], picked_by_condition)
    return flow.closed(picked).const


def index_mask(mask: Value, dims: Sequence[Group]) -> Value:
    """A boolean index as a mask over `dims`: at run time it has exactly the sizes of the leading ones."""
    mapping = same_positions(mask.dims, dims, set())
    return remapped(mask, (*dims[: len(mask.dims)], *((),) * (len(dims) - len(mask.dims))), mapping)


@rule("aten.masked_select.default")
def masked_select(flow: Flow, node: Node, a: Any, mask: Any) -> Value:
    return also_reading(flow, scattered(flow.value(a), node), mask)


@rule("aten.embedding.default")
def embedding(flow: Flow, node: Node, weight: Any, indices: Any, *_: Any, **__: Any) -> Value:
    value, positions = flow.value(weight), flow.value(indices)
    read = remapped(value, (*positions.dims, value.dims[1]), forgotten(value.dims[:1]))
    return replace(read, rows=joined_rows([read.rows, positions.rows]))


@rule("aten.take.default")
def take(flow: Flow, node: Node, a: Any, index: Any) -> Value:
    return also_reading(flow, scattered(flow.value(a), node), index)
