"""Reading at positions that are data: gather, index, index_select, embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gradprune.passes.affine import Affine, Atom, Group, group_of, groups_of, match_groups, product, size_of
from gradprune.passes.domain import Known, Value, joined_rows, moved_rows
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
    return also_reading(flow, remapped(value, dims, forgotten(value.dims[place : place + 1])), index)


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index_(flow: Flow, node: Node, a: Any, indices: Sequence[Any]) -> Value:
    value = flow.value(a)
    shape = node.meta["val"].shape
    dims, mapping = indexed_dims(value.dims, indices, groups_of(shape))
    read = also_reading(flow, remapped(value, dims, mapping), *(index for index in indices if index is not None))
    selected = _known_where_selected(flow, node, value, indices)
    return replace(read, const=selected) if selected is not None and read.const is None else read


def indexed_dims(
    dims: Sequence[Group], indices: Sequence[Any], result: Sequence[Group]
) -> tuple[tuple[Group, ...], dict[Atom, Affine | None]]:
    """Dims of ``a[indices]`` given fresh groups of its shape, and where the atoms of `a` are in it.

    Dimensions that are not indexed stay; the indexed ones give way to the broadcast index, in place if they are
    adjacent, else in front. A boolean index takes as many dimensions as it has, and gives one.
    """
    taken: list[bool] = []
    for index in indices:
        mask = index is not None and index.meta["val"].dtype in (torch.bool, torch.uint8)
        taken += [index is not None] * (index.meta["val"].dim() if mask else 1)
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
    return tuple(out), forgotten(dims[place] for place in gone)


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
