"""Building blocks of transfer rules: pointwise combination, reading at other positions, dropping dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from gradprune.passes.affine import Affine, Atom, Group, Mapped, groups_of, match_groups, product, same_size
from gradprune.passes.domain import (
    Facts,
    Key,
    Known,
    Reach,
    Value,
    exact,
    joined_rows,
    moved_facts,
    moved_rows,
)
from gradprune.passes.flow import Flow, Node
from gradprune.passes.intervals import ANY, Interval, rounded

Combine = Callable[..., Known | None]
"""What the result equals at a position, from what each operand is known to equal there (None: not known)."""


def dtype_of(node: Node) -> torch.dtype | None:
    """The dtype of a node's tensor; of a symbolic number, the one that Python computes in."""
    meta = node.meta.get("val")
    if isinstance(meta, tuple | list):
        meta = meta[0]
    if isinstance(meta, torch.Tensor):
        return meta.dtype
    return {torch.SymInt: torch.int64, torch.SymBool: torch.bool}.get(type(meta), torch.float64)


def shape_of(node: Node) -> Sequence[Any]:
    meta = node.meta.get("val")
    meta = meta[0] if isinstance(meta, tuple | list) else meta
    return meta.shape if isinstance(meta, torch.Tensor) else ()


def operands(flow: Flow, dtype: torch.dtype | None, *arguments: Any) -> list[Value]:
    """Values of operands as a kernel that computes in `dtype` reads them."""
    result = []
    for argument in arguments:
        if not isinstance(argument, Node):
            result.append(flow.literal(argument, dtype))
            continue
        value = flow.value(argument)
        result.append(value if value.dtype == dtype else as_dtype(value, dtype))
    return result


def as_dtype(value: Value, dtype: torch.dtype | None) -> Value:
    """`value` after the implicit promotion of an operand to `dtype`."""

    def kept(known: Known | None) -> Known | None:
        number = None if known is None else exact(known.value, dtype)
        return Known(number, known.needs) if known is not None and number is not None else None

    facts = {key: known for key, before in value.facts.items() if (known := kept(before)) is not None}
    bounds = rounded(value.bounds, dtype)
    return replace(value, dtype=dtype, const=kept(value.const), facts=facts, bounds=bounds)


def computed_in(*arguments: Any) -> torch.dtype | None:
    """The dtype in which a comparison of these operands is made: that of torch's type promotion."""
    tensors = [a.meta["val"] for a in arguments if isinstance(a, Node) and isinstance(a.meta["val"], torch.Tensor)]
    numbers = [
        _number_dtype(a) for a in arguments if not (isinstance(a, Node) and isinstance(a.meta["val"], torch.Tensor))
    ]
    result: torch.dtype | None = None
    for group in ([t.dtype for t in tensors if t.dim() > 0], [t.dtype for t in tensors if t.dim() == 0], numbers):
        promoted: torch.dtype | None = None
        for dtype in group:
            promoted = dtype if promoted is None else torch.promote_types(promoted, dtype)
        if promoted is not None and (result is None or _category(promoted) > _category(result)):
            result = promoted
    if result == torch.float64 and not any(t.dtype == torch.float64 for t in tensors) and tensors:
        return torch.get_default_dtype()
    return result


def _number_dtype(argument: Any) -> torch.dtype:
    kind = type(argument.meta["val"] if isinstance(argument, Node) else argument)
    if kind in (bool, torch.SymBool):
        return torch.bool
    return torch.int64 if kind in (int, torch.SymInt) else torch.float64


def _category(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1


def pointwise(
    node: Node,
    values: Sequence[Value],
    combine: Combine,
    *,
    bounds: Interval = ANY,
    notnan: bool = False,
    reach: Reach | None = None,
    broken: bool = False,
) -> Value:
    """The result of an operator that computes each element from the operands' elements at the same position."""
    result = combined(dtype_of(node), shape_of(node), values, combine)
    return replace(result, bounds=bounds, notnan=notnan, reach=reach, broken=broken)


def combined(dtype: torch.dtype | None, shape: Sequence[Any], values: Sequence[Value], combine: Combine) -> Value:
    """Constant, facts and row of a pointwise result of this dtype and shape."""
    dims, mappings = broadcast(shape, [value.dims for value in values])
    aligned = [moved_facts(value.facts, mapping) for value, mapping in zip(values, mappings)]
    consts = [value.const for value in values]
    keys: set[Key] = set().union(*aligned)
    facts = {}
    for key in keys:
        known = _kept(combine(*(c if c is not None else f.get(key) for c, f in zip(consts, aligned))), dtype)
        if known is not None:
            facts[key] = known
    const = _kept(combine(*consts), dtype)
    rows = joined_rows(moved_rows(value.rows, mapping) for value, mapping in zip(values, mappings))
    return Value(dims, dtype, const, facts, rows=rows)


def _kept(known: Known | None, dtype: torch.dtype | None) -> Known | None:
    number = None if known is None else exact(known.value, dtype)
    return Known(number, known.needs) if known is not None and number is not None else None


def broadcast(
    shape: Sequence[Any], operand_dims: Sequence[Sequence[Group]]
) -> tuple[tuple[Group, ...], list[dict[Atom, Affine | None]]]:
    """The index space of a broadcast result of this shape, and for each operand where its atoms are in it."""
    rank = max((len(dims) for dims in operand_dims), default=0)
    mappings: list[dict[Atom, Affine | None]] = [{} for _ in operand_dims]
    result: list[Group] = []
    for place in range(rank):
        groups = [dims[place - rank] if place - rank >= -len(dims) else () for dims in operand_dims]
        longest = max(groups, key=len)
        if any(group and not _same_extent(group, longest) for group in groups):
            # Sizes that depend on data: one of them may be 1 at run time and be broadcast, so no position is known.
            longest = groups_of(shape[place : place + 1])[0]
            for mapping, group in zip(mappings, groups):
                mapping.update(dict.fromkeys(group))
        else:
            for mapping, group in zip(mappings, groups):
                match_groups(group, longest, mapping)
        result.append(longest)
    return tuple(result), mappings


def _same_extent(group: Group, other: Group) -> bool:
    return group == other or same_size(product(a.size for a in group), product(b.size for b in other))


def remapped(value: Value, dims: Iterable[Group], mapping: Mapped | None = None) -> Value:
    """A tensor each of whose elements is one of `value`'s, read at the mapped positions."""
    mapping = mapping or {}
    facts, rows = moved_facts(value.facts, mapping), moved_rows(value.rows, mapping)
    return replace(value, dims=tuple(dims), facts=facts, rows=rows)


def read_at(value: Value, dims: Sequence[Group]) -> Value:
    """`value` in the atoms of `dims`, an index space of the same shape."""
    mapping: dict[Atom, Affine | None] = {}
    for group, target in zip(value.dims, dims, strict=True):
        match_groups(group, target, mapping)
    return remapped(value, dims, mapping)


def forgotten(groups: Iterable[Group]) -> dict[Atom, Affine | None]:
    """The mapping under which positions in these dimensions are not known."""
    return {atom: None for group in groups for atom in group}


def scattered(value: Value, node: Node) -> Value:
    """A tensor of the node's shape each of whose elements is one of `value`'s, from an unknown position."""
    return remapped(value, groups_of(node.meta["val"].shape), forgotten(value.dims))


def also_reading(flow: Flow, value: Value, *nodes: Any) -> Value:
    """`value`, that also depends on unknown elements of these tensors."""
    others = [flow.value(node) for node in nodes]
    return replace(value, rows=joined_rows([value.rows, *(moved_rows(o.rows, forgotten(o.dims)) for o in others)]))


def only_zeros(facts: Facts, extra: frozenset[Any] = frozenset()) -> Facts:
    """The facts that say zero, with additional needs."""
    return {key: Known(0, known.needs | extra) for key, known in facts.items() if known.value == 0}


def axis(dim: int, rank: int) -> int:
    """A dimension argument as a nonnegative index; 0 for a tensor without dimensions."""
    return dim % rank if rank else 0
