"""What the zero-flow analysis knows of one tensor of the program.

Every claim holds for each input that satisfies the hypothesis and, where it carries needs, these side conditions.
``docs/soundness.md`` states the meaning of each field and the assumptions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import torch
import torch.fx

from gradprune.passes.affine import EVERY, Group, Index, Mapped, moved
from gradprune.passes.intervals import ANY, Interval, is_finite, range_of

Number = bool | int | float
NeedKind = Literal["finite", "notnan", "nonzero", "nonempty", "bounded"]


class Need(NamedTuple):
    """A side condition: every element of the value of `node` is of this kind."""

    kind: NeedKind
    node: torch.fx.Node


Needs = frozenset[Need]
NO_NEEDS: Final[Needs] = frozenset()


class Known(NamedTuple):
    """Elements equal `value` exactly (-0.0 equals 0.0), given `needs`. Never NaN."""

    value: Number
    needs: Needs = NO_NEEDS


class Key(NamedTuple):
    """The premise of a fact at index i: `factor` is zero at ``indices(i)``, or that is outside of the factor.

    An EVERY among the indices asks for zero at all positions of that dimension.
    """

    factor: str
    indices: tuple[Index, ...]


Facts = Mapping[Key, Known]
NO_FACTS: Final[Facts] = {}


class Reach(NamedTuple):
    """No element is NaN or exceeds `limit` in magnitude, given `needs`."""

    limit: float
    needs: Needs = NO_NEEDS


@dataclass(frozen=True, slots=True)
class Value:
    """Knowledge of one tensor.

    dims: its index space, a group of atoms per dimension.
    const: every element equals this.
    facts: premise -> what the elements equal where it holds.
    bounds: of the elements that are not NaN. `notnan`: none is NaN.
    reach: magnitude of a value of the backward, in terms of forward values.
    broken: some element is NaN or infinite, whatever the input, if there is an element at all.
    rows: the only row of the batch that an element depends on: None for no row, EVERY for unknown.
    """

    dims: tuple[Group, ...]
    dtype: torch.dtype | None
    const: Known | None = None
    facts: Facts = field(default_factory=dict)
    bounds: Interval = ANY
    notnan: bool = False
    reach: Reach | None = None
    broken: bool = False
    rows: Index | None = EVERY

    @property
    def finite(self) -> bool:
        """Whether every element is finite, unconditionally."""
        return self.notnan and is_finite(self.bounds)

    def at(self, key: Key) -> Known | None:
        """What the elements equal where the premise `key` holds."""
        return self.const if self.const is not None else self.facts.get(key)

    def is_zero(self) -> bool:
        return self.const is not None and self.const.value == 0


def unknown(dims: tuple[Group, ...], dtype: torch.dtype | None) -> Value:
    """Nothing but what the dtype says."""
    return Value(dims, dtype, bounds=range_of(dtype), notnan=_has_no_nan(dtype))


def _has_no_nan(dtype: torch.dtype | None) -> bool:
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex


def moved_facts(facts: Facts, mapping: Mapped) -> Facts:
    """Facts of a tensor that reads this one at mapped positions."""
    if not facts or not mapping:
        return facts
    result: dict[Key, Known] = {}
    for (factor, index), known in facts.items():
        key = Key(factor, tuple([moved(part, mapping) for part in index]))
        if key not in result or cost(known.needs) < cost(result[key].needs):
            result[key] = known
    return result


def moved_rows(rows: Index | None, mapping: Mapped) -> Index | None:
    return rows if rows is None else moved(rows, mapping)


def joined_rows(rows: Iterable[Index | None]) -> Index | None:
    """The row that a value made from values of these rows depends on."""
    read = {row for row in rows if row is not None}
    return None if not read else read.pop() if len(read) == 1 else EVERY


def met_facts(values: Iterable[tuple[Known | None, Facts]]) -> tuple[Known | None, Facts]:
    """What holds of an element that is taken from any one of several tensors (their constants and facts)."""
    const, facts = None, NO_FACTS
    for position, (other_const, other_facts) in enumerate(values):
        if position == 0:
            const, facts = other_const, other_facts
            continue
        keys = {*facts, *other_facts}
        merged = {key: _same(const or facts.get(key), other_const or other_facts.get(key)) for key in keys}
        facts = {key: known for key, known in merged.items() if known is not None}
        const = _same(const, other_const)
    return const, facts


def _same(a: Known | None, b: Known | None) -> Known | None:
    return Known(a.value, a.needs | b.needs) if a is not None and b is not None and a.value == b.value else None


def cheapest(options: Iterable[Known | None]) -> Known | None:
    """Of several derivations the one with the fewest needs, those of the backward counted first."""
    known = [option for option in options if option is not None]
    return min(known, key=lambda option: cost(option.needs)) if known else None


def cost(needs: Needs) -> tuple[int, int]:
    """How many needs speak of the backward, which only running it can check, and how many there are."""
    return sum(need.node.op == "call_function" and "call" not in need.node.meta for need in needs), len(needs)


def exact(value: Number, dtype: torch.dtype | None) -> Number | None:
    """`value` if a kernel of this dtype computes it without rounding or wrap-around, else None."""
    if dtype is None or dtype.is_complex or math.isnan(value):
        return None
    if dtype == torch.bool:
        return bool(value)
    if not dtype.is_floating_point:
        low, high = range_of(dtype)
        whole = math.isfinite(value) and value == int(value) and abs(value) < 2**53
        return int(value) if whole and low <= value <= high else None
    if value == 0 or math.isinf(value):
        return value
    mantissa, exponent = math.frexp(value)
    return value if (mantissa * 256).is_integer() and -10 <= exponent <= 15 else None
