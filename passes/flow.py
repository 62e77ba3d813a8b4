"""The abstract interpreter: walks a joint graph and asks a rule for the value of each node."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import sympy
import torch
import torch.fx

from gradprune.facts import BOUND
from gradprune.passes.affine import EVERY, Index, Size, groups_of, size_of
from gradprune.passes.domain import (
    NO_NEEDS,
    Key,
    Known,
    Need,
    NeedKind,
    Needs,
    Number,
    Reach,
    Value,
    cheapest,
    exact,
    unknown,
)
from gradprune.passes.intervals import Interval, is_finite, magnitude, range_of, rounded
from gradprune.passes.registry import arguments_of, operator_name, rule_of

Node = torch.fx.Node
Result = Value | tuple[Value | None, ...] | None

ROW: Final = "<row>"
"""The name of the premise "the hypothesis holds all over this row", beside the factors' names."""
TANGENT: Final = 2.0**32
"""Assumed limit of the cotangent of an output: loss scaling included."""
SAME_ELEMENTS: Final = frozenset("unsqueeze squeeze expand view permute transpose t neg slice select flip".split())
"""Operators each of whose elements is one of the operand's, up to its sign."""
MOST_CONSTANTS: Final = 4096


_LAYOUT = (torch.ops.aten.sym_stride.int, torch.ops.aten.sym_storage_offset.default)


@dataclass(frozen=True)
class Clause:
    """The hypothesis over index axes: at each assignment of the axes, some factor is zero.

    axes: factor -> for each of its dimensions the axis, None where its size is 1.
    """

    axes: Mapping[str, tuple[int | None, ...]]

    def covers(self, facts: Mapping[Key, Known]) -> Iterable[tuple[Known, Index]]:
        """What elements equal at every position where the clause holds, with the index on axis 0."""
        by_factor = [[item for item in facts.items() if item[0].factor == factor] for factor in self.axes]
        if not by_factor or not all(by_factor):
            return
        for choice in itertools.product(*by_factor):
            values = [known.value for _, known in choice]
            if any(value != values[0] for value in values):
                continue
            indices = self._aligned([key.indices for key, _ in choice])
            if indices is not None:
                needs = NO_NEEDS.union(*(known.needs for _, known in choice))
                yield Known(values[0], needs), indices.get(0, EVERY)

    def _aligned(self, premises: Sequence[tuple[Index, ...]]) -> dict[int, Index] | None:
        """The index on each axis if the premises speak of one position, else None.

        ``for all t: a(r) or b(r, t)`` gives ``a(r) or (for all t: b(r, t))``: an axis may be asked for at EVERY
        position by one factor only, and by no other factor at all.
        """
        indices: dict[int, Index] = {}
        for axes, premise in zip(self.axes.values(), premises):
            for axis, index in zip(axes, premise):
                if axis is None:
                    continue
                if axis in indices and (index is EVERY or index != indices[axis]):
                    return None
                indices[axis] = index
        return indices


@dataclass
class Flow:
    """One run of the analysis over the nodes that the gradients depend on.

    sources: placeholder -> its value; every other placeholder is unknown.
    backward: the nodes that only the backward computes. cotangents: those that depend on a tangent.
    rowwise: derive what holds in a row where the hypothesis holds, the other rows being arbitrary.
    """

    graph_module: torch.fx.GraphModule
    clause: Clause
    sources: Mapping[Node, Value]
    backward: frozenset[Node]
    cotangents: frozenset[Node]
    shape_env: Any
    rowwise: bool = False
    values: dict[Node, Any] = field(default_factory=dict)
    unruled: dict[Node, str] = field(default_factory=dict)
    _size_bounds: dict[Size, Interval] = field(default_factory=dict)
    _equal: dict[Node, Node] = field(default_factory=dict)
    _first: dict[Any, Node] = field(default_factory=dict)

    def run(self, nodes: Iterable[Node]) -> Flow:
        for node in nodes:
            self.values[node] = self._evaluate(node)
        return self

    def _evaluate(self, node: Node) -> Any:
        if node.op == "placeholder":
            value = self.sources.get(node)
            return self._settled(node, value) if value is not None else self._of_meta(node.meta.get("val"))
        if node.op != "call_function":
            return self._of_constant(node) if node.meta.get("constant") else self._of_meta(node.meta.get("val"))
        if isinstance(node.meta.get("val"), torch.SymInt):
            if node.target in _LAYOUT:
                return unknown((), torch.int64)  # a kernel may lay out memory otherwise than its trace does
            return self._default(node, node.meta["val"])
        name = operator_name(node.target)
        rule = rule_of(name)
        args, kwargs = arguments_of(node)
        result = rule(self, node, *args, **kwargs) if rule is not None else None
        if rule is None and node.meta.get("val") is not None:
            self.unruled[node] = name
        return self._completed(node, result)

    def _of_constant(self, node: Node) -> Any:
        """A tensor that the program makes from Python numbers; anything else, as a process group, has no value."""
        tensor = getattr(self.graph_module, str(node.target))
        if not isinstance(tensor, torch.Tensor):
            return self._of_meta(node.meta.get("val"))
        value = replace(unknown(groups_of(tensor.shape), tensor.dtype), rows=None)
        if tensor.is_complex() or not 0 < tensor.numel() <= MOST_CONSTANTS or tensor.isnan().any():
            return value
        low, high = float(tensor.min()), float(tensor.max())
        const = Known(tensor.flatten()[0].item()) if low == high else None
        return self._settled(node, replace(value, const=const, bounds=(low, high), notnan=True))

    def _completed(self, node: Node, result: Result) -> Any:
        meta = node.meta.get("val")
        if not isinstance(meta, tuple | list):
            assert not isinstance(result, tuple), f"the rule for {node.target} returned a tuple"
            return self._settled(node, result) if result is not None else self._default(node, meta)
        results = result if isinstance(result, tuple) else (result,) * len(meta)
        assert len(results) == len(meta), f"the rule for {node.target} returned {len(results)} of {len(meta)} values"
        return tuple(
            self._default(node, part) if value is None else self._settled(node, value, part)
            for value, part in zip(results, meta)
        )

    def _default(self, node: Node, meta: Any) -> Any:
        value = self._of_meta(meta)
        if isinstance(value, Value) and self._reads_no_row(node):
            return replace(value, rows=None)
        return value

    def _reads_no_row(self, node: Node) -> bool:
        """Whether the result is the same whatever the batch holds: no random or uninitialised numbers either."""
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or "empty" in str(node.target):
            return False
        inputs = [self.values.get(source) for source in node.all_input_nodes]
        parts = [part for value in inputs for part in (value if isinstance(value, tuple) else (value,))]
        return all(part.rows is None for part in parts if isinstance(part, Value))

    def _is_sized_by_data(self, meta: Any) -> bool:
        """Whether other rows decide how many elements there are: a sum of ones then depends on them."""
        sizes = [size_of(size) for size in meta.shape] if isinstance(meta, torch.Tensor) else []
        symbols = [symbol for size in sizes if not isinstance(size, int) for symbol in size.free_symbols]
        return any(self.shape_env.is_unbacked_symint(symbol) for symbol in symbols)

    def _of_meta(self, meta: Any) -> Any:
        if isinstance(meta, torch.Tensor):
            return unknown(groups_of(meta.shape), meta.dtype)
        if isinstance(meta, bool | int | float):
            return self.literal(meta, None)
        if isinstance(meta, torch.SymInt):
            return self._of_size(size_of(meta))
        if isinstance(meta, torch.SymFloat):
            return unknown((), torch.float64)
        if isinstance(meta, torch.SymBool):
            return unknown((), torch.bool)
        return meta

    def _of_size(self, size: Size) -> Value:
        if isinstance(size, int):
            return self.literal(size, torch.int64)
        of_data = any(self.shape_env.is_unbacked_symint(symbol) for symbol in size.free_symbols)
        return Value((), torch.int64, bounds=self.size_bounds(size), notnan=True, rows=EVERY if of_data else None)

    def size_bounds(self, size: Size) -> Interval:
        if isinstance(size, int):
            return (float(size), float(size))
        if size not in self._size_bounds:
            low, high = range_of(torch.int64)
            lower, upper = self._algebraic_bounds(size)
            self._size_bounds[size] = (
                float(lower) if isinstance(lower, sympy.Integer) else low,
                float(upper) if isinstance(upper, sympy.Integer) else high,
            )
        return self._size_bounds[size]

    def _algebraic_bounds(self, size: sympy.Expr) -> tuple[Any, Any]:
        try:
            bounds = self.shape_env.bound_sympy(size)
        except (ArithmeticError, AssertionError, RecursionError, TypeError, ValueError):  # of powers, for instance
            return None, None
        return bounds.lower, bounds.upper

    def _settled(self, node: Node, value: Value, meta: Any = None) -> Value:
        """`value` with what holds of any value, and with the hypothesis applied."""
        meta = node.meta.get("val") if meta is None else meta
        rank = meta.dim() if isinstance(meta, torch.Tensor) else 0
        assert len(value.dims) == rank, f"the rule for {node.target} returned rank {len(value.dims)}, not {rank}"
        const, bounds, notnan, rows = value.const, value.bounds, value.notnan, value.rows
        if const is not None and exact(const.value, value.dtype) is None:
            const = None
        if not is_finite(range_of(value.dtype)):
            bounds = rounded(bounds, value.dtype)
        else:
            bounds, notnan = rounded(bounds, value.dtype), True
        if node.op == "call_function":
            free = (const is not None and not const.needs) or self._reads_no_row(node)
            free = free and not self._is_sized_by_data(meta)
            rows = None if free else EVERY if rows is None else rows
        reach = value.reach if value.reach is not None and value.reach.limit <= _largest(value.dtype) else None
        value = replace(value, const=const, bounds=bounds, notnan=notnan, rows=rows, reach=reach)
        return _pinned(self.closed(value))

    def closed(self, value: Value) -> Value:
        """`value` with the hypothesis applied to its facts."""
        if value.const is not None or not value.facts:
            return value
        covered = list(self.clause.covers(value.facts))
        if not covered:
            return value
        if not self.rowwise:
            return replace(value, const=cheapest(known for known, _ in covered))
        facts = dict(value.facts)
        for known, row in covered:
            if row is not EVERY:
                key = Key(ROW, (row,))
                facts[key] = cheapest([known, facts.get(key)]) or known
        return replace(value, facts=facts)

    def first_equal(self, node: Node) -> Node:
        """The first node asked for that computes what `node` does: the same operator, equal operands, no randomness."""
        if node not in self._equal:
            key: Any = node
            target, meta = node.target, node.meta.get("val")
            if isinstance(meta, torch.SymInt):
                key = size_of(meta)
            elif isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in target.tags:
                key = (target, repr(torch.fx.node.map_arg((node.args, node.kwargs), self.first_equal)))
            self._equal[node] = self._first.setdefault(key, node)
        return self._equal[node]

    # -- what rules ask ------------------------------------------------------------------------------------------

    def value(self, argument: Any) -> Value:
        """The value of an operand: a node, or a Python number."""
        if isinstance(argument, Node):
            value = self.values[argument]
            assert isinstance(value, Value), f"{argument} is not one tensor or number"
            return value
        return self.literal(argument, None)

    def literal(self, number: Number, dtype: torch.dtype | None) -> Value:
        """A Python number as an operand of a kernel that computes in `dtype` (None: as a Python number)."""
        if dtype is None:
            known_as = (
                torch.bool if isinstance(number, bool) else torch.int64 if isinstance(number, int) else torch.float64
            )
            dtype = known_as
        if isinstance(number, complex) or math.isnan(number):
            return replace(unknown((), torch.float64), rows=None)
        same = exact(number, dtype)
        bounds = rounded((float(number), float(number)), dtype)
        return Value((), dtype, Known(same) if same is not None else None, bounds=bounds, notnan=True, rows=None)

    def finite(self, argument: Any, dtype: torch.dtype | None = None) -> Needs | None:
        """What makes every element of the operand finite, as a kernel of `dtype` reads it; None if nothing can."""
        value = self.value(argument)
        if value.broken or _is_nan(argument) or (value.const is not None and math.isinf(value.const.value)):
            return None
        if _narrows(value.dtype, dtype):
            return NO_NEEDS if value.notnan and is_finite(rounded(value.bounds, dtype)) else None
        if value.finite:
            return NO_NEEDS
        if value.const is not None:
            return value.const.needs
        return self._derived("finite", argument, value)

    def notnan(self, argument: Any) -> Needs | None:
        value = self.value(argument)
        if value.broken or _is_nan(argument):
            return None
        if value.notnan:
            return NO_NEEDS
        if value.const is not None:
            return value.const.needs
        return self._derived("notnan", argument, value)

    def nonzero(self, argument: Any, dtype: torch.dtype | None = None) -> Needs | None:
        """What makes every element of the operand neither 0 nor NaN, as a kernel of `dtype` reads it."""
        value = self.value(argument)
        low, high = rounded(value.bounds, dtype) if _narrows(value.dtype, dtype) else value.bounds
        apart = not low <= 0 <= high
        if value.const is not None and (apart or not _narrows(value.dtype, dtype)):
            return value.const.needs if value.const.value != 0 else None
        notnan = self.notnan(argument)
        if notnan is None or apart:
            return notnan
        if not isinstance(argument, Node) or _narrows(value.dtype, dtype):
            return None
        return notnan | self.condition("nonzero", argument)

    def nonempty(self, size: Size, argument: Any) -> Needs | None:
        """What makes `size`, the number of elements that go into each result of a reduction of `argument`, positive."""
        low, high = self.size_bounds(size)
        if high < 1:
            return None
        return NO_NEEDS if low >= 1 else self.condition("nonempty", argument)

    def reach(self, argument: Any, dtype: torch.dtype | None = None) -> Reach | None:
        """A limit of the operand's magnitude, with what it needs; None where a kernel of `dtype` may overflow on it."""
        reach = self._reach(argument)
        return reach if reach is None or dtype is None or reach.limit <= _largest(dtype) else None

    def _reach(self, argument: Any) -> Reach | None:
        value = self.value(argument)
        if value.broken or _is_nan(argument):
            return None
        if value.const is not None and math.isfinite(value.const.value):
            return Reach(abs(value.const.value), value.const.needs)
        if value.finite:
            return Reach(magnitude(value.bounds))
        if value.reach is not None or argument in self.backward:
            return value.reach
        if is_finite(value.bounds):
            return Reach(magnitude(value.bounds), self.condition("notnan", argument))
        source = _same_elements(argument) if isinstance(argument, Node) else None
        if source is None or source.op != "placeholder":
            return None
        return Reach(BOUND, self.condition("bounded", source))

    def _derived(self, kind: NeedKind, argument: Any, value: Value) -> Needs:
        """The condition on the value itself; for one of the backward, forward conditions that imply it, if known."""
        if argument in self.backward and value.reach is not None:
            return value.reach.needs
        return self.condition(kind, argument)

    def condition(self, kind: NeedKind, argument: Any) -> Needs:
        """The side condition that every element of a node's value is of this kind."""
        assert isinstance(argument, Node), f"a number needs no condition: {argument}"
        return frozenset([Need(kind, argument)])


def _is_nan(argument: Any) -> bool:
    """Whether an operand is a Python number that is NaN, or complex, of which nothing is claimed."""
    return isinstance(argument, complex) or (isinstance(argument, float) and math.isnan(argument))


def _same_elements(node: Node) -> Node:
    """The node whose elements, or some of them, `node` only arranges anew."""
    while node.op == "call_function" and getattr(node.target, "_opname", None) in SAME_ELEMENTS:
        node = node.all_input_nodes[0]
    return node


def _narrows(before: torch.dtype | None, after: torch.dtype | None) -> bool:
    """Whether a conversion may turn a finite number into an infinite one, or one that is not zero into zero."""
    if before is None or after is None or before == after or not after.is_floating_point:
        return False
    if not before.is_floating_point:
        return _largest(before) > _largest(after)
    info, other = torch.finfo(before), torch.finfo(after)
    return info.max > other.max or info.smallest_normal < other.smallest_normal


def _largest(dtype: torch.dtype | None) -> float:
    if dtype is None or not dtype.is_floating_point:
        return magnitude(range_of(dtype)) if dtype is not None and not dtype.is_complex else 0.0
    return torch.finfo(dtype).max


def _pinned(value: Value) -> Value:
    """A constant that needs nothing is its own bound."""
    if value.const is None or value.const.needs:
        return value
    number = float(value.const.value)
    return replace(value, bounds=(number, number), notnan=True, broken=False)
