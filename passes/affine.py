"""Sizes and affine index expressions: how an index of one tensor is computed from the indices of another.

An `Atom` is an index variable that runs over ``range(size)``. A dimension of a tensor is a group of atoms, most
significant first (a dimension that a view merged has two); a dimension of size 1 has none. An `Affine` is an integer
expression of atoms. `EVERY` stands for "all positions of this dimension".
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

import sympy
import torch
import torch.fx

Size: TypeAlias = "int | sympy.Expr"


class Atom:
    """An index variable; compared by identity."""

    __slots__ = ("serial", "size")
    _serials = itertools.count()

    def __init__(self, size: Size) -> None:
        self.size = size
        self.serial = next(Atom._serials)

    def __repr__(self) -> str:
        return f"i{self.serial}"


class Looked(Atom):
    """A digit of a number that a tensor of indices holds: ``node[at] // stride % size``.

    A negative number counts from `extent`, the size of the dimension that is read there. Made by `looked`.
    """

    __slots__ = ("at", "extent", "node", "stride")

    def __init__(self, node: torch.fx.Node, at: tuple[Affine, ...], stride: Size, size: Size, extent: Size) -> None:
        super().__init__(size)
        self.node, self.at, self.stride, self.extent = node, at, stride, extent


class Affine(NamedTuple):
    """`offset` plus the sum of coefficient times atom; terms ordered by atom, no zero coefficient."""

    offset: Size
    terms: tuple[tuple[Atom, Size], ...] = ()

    def __repr__(self) -> str:
        parts = [f"{atom}" if coefficient == 1 else f"{coefficient}*{atom}" for atom, coefficient in self.terms]
        return "+".join(parts + ([str(self.offset)] if self.offset != 0 or not parts else []))


class Every(enum.Enum):
    EVERY = "*"

    def __repr__(self) -> str:
        return "*"


EVERY: Final = Every.EVERY
Index = Affine | Every
Group = tuple[Atom, ...]
Mapped = Mapping[Atom, Affine | None]
"""Atoms to expressions of new atoms; None where an atom's position is not known in terms of new ones."""


def size_of(value: int | torch.SymInt | sympy.Expr) -> Size:
    """A tensor's size as a plain int where it is known, else a sympy expression with known equalities applied."""
    if isinstance(value, int):
        return int(value)
    expression = value.node.expr if isinstance(value, torch.SymInt) else value
    return int(expression) if expression.is_Integer else expression


def same_size(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for every value of their symbols, as far as algebra shows."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return a == b or _difference_is_zero(sympy.sympify(a), sympy.sympify(b))


@lru_cache(maxsize=4096)
def _difference_is_zero(a: sympy.Expr, b: sympy.Expr) -> bool:
    return bool(sympy.expand(a - b) == 0)


def times(a: Size, b: Size) -> Size:
    return a * b if isinstance(a, int) and isinstance(b, int) else _tidy(sympy.sympify(a) * b)


def plus(a: Size, b: Size) -> Size:
    return a + b if isinstance(a, int) and isinstance(b, int) else _tidy(sympy.sympify(a) + b)


@lru_cache(maxsize=4096)
def _tidy(expression: sympy.Expr) -> Size:
    expression = sympy.expand(expression)
    return int(expression) if expression.is_Integer else expression


def product(sizes: Iterable[Size]) -> Size:
    result: Size = 1
    for size in sizes:
        result = times(result, size)
    return result


def quotient(a: Size, b: Size) -> Size | None:
    """a / b where that is a whole number for every value of the symbols, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b > 0 and a % b == 0 else None
    return _symbolic_quotient(sympy.sympify(a), sympy.sympify(b))


@lru_cache(maxsize=4096)
def _symbolic_quotient(a: sympy.Expr, b: sympy.Expr) -> Size | None:
    result = sympy.cancel(a / b)
    if not result.is_integer or not result.is_polynomial():
        return None
    if result.is_number:
        return int(result) if result >= 1 else None
    return result


def index_of(atom: Atom) -> Affine:
    return Affine(0, ((atom, 1),))


def affine(offset: Size, terms: Iterable[tuple[Atom, Size]]) -> Affine:
    kept = [(atom, coefficient) for atom, coefficient in terms if coefficient != 0]
    return Affine(offset, tuple(sorted(kept, key=lambda term: term[0].serial)))


def flattened(group: Sequence[Atom]) -> Affine:
    """The index of a dimension as an expression of its atoms."""
    if len(group) == 1:
        return index_of(group[0])
    terms: list[tuple[Atom, Size]] = []
    stride: Size = 1
    for atom in reversed(group):
        terms.append((atom, stride))
        stride = times(stride, atom.size)
    return affine(0, terms)


def looked(node: torch.fx.Node, at: tuple[Affine, ...], group: Group) -> dict[Atom, Affine | None]:
    """Where the atoms of a dimension are that is read at the numbers that `node` holds at `at`: the same each time."""
    known = node.meta.setdefault("looked", {})
    stride, extent = 1, product(atom.size for atom in group)
    mapping: dict[Atom, Affine | None] = {}
    for atom in reversed(group):
        key = (at, stride, atom.size, extent)
        if key not in known:
            known[key] = Looked(node, *key)
        mapping[atom] = index_of(known[key])
        stride = times(stride, atom.size)
    return mapping


def _target(atom: Atom, mapping: Mapped) -> Affine | None:
    """What an atom is in new atoms; `_KEEP` where it stays."""
    if atom in mapping or not isinstance(atom, Looked):
        return mapping.get(atom, _KEEP)
    at = [moved(index, mapping) for index in atom.at]
    if at == [*atom.at]:
        return _KEEP
    known = tuple(index for index in at if index is not EVERY)
    if len(known) < len(at):
        return None
    key = (known, atom.stride, atom.size, atom.extent)
    return index_of(atom.node.meta["looked"].setdefault(key, Looked(atom.node, *key)))


def moved(index: Index, mapping: Mapped) -> Index:
    """`index` in new atoms; EVERY where it needs an atom that maps to None."""
    if index is EVERY or not index.terms:
        return index
    offset = index.offset
    terms: dict[Atom, Size] = {}
    for atom, coefficient in index.terms:
        target = _target(atom, mapping)
        if target is None:
            return EVERY
        if target is _KEEP:
            terms[atom] = plus(terms.get(atom, 0), coefficient)
            continue
        offset = plus(offset, times(coefficient, target.offset))
        for inner, factor in target.terms:
            terms[inner] = plus(terms.get(inner, 0), times(coefficient, factor))
    return affine(offset, terms.items())


_KEEP: Final = Affine(-1)


def group_of(size: Size) -> Group:
    return () if isinstance(size, int) and size == 1 else (Atom(size),)


def groups_of(shape: Iterable[int | torch.SymInt]) -> tuple[Group, ...]:
    """Fresh atoms for a tensor of this shape."""
    return tuple(group_of(size_of(size)) for size in shape)


def match_groups(group: Group, target: Group, mapping: dict[Atom, Affine | None]) -> None:
    """Extend `mapping` so that positions of `group` are read off `target`, a dimension of the same size.

    Where the sizes are not provably equal the positions are unknown: mapped to None.
    """
    if group == target:
        return
    if len(group) == len(target) and all(same_size(a.size, b.size) for a, b in zip(group, target)):
        mapping.update({a: index_of(b) for a, b in zip(group, target)})
    elif len(group) == 1 and target and same_size(group[0].size, product(atom.size for atom in target)):
        mapping[group[0]] = flattened(target)
    else:
        mapping.update(dict.fromkeys(group))
