"""Checks every claim that the analysis makes of every node against what the node really computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.fx

from gradprune.facts import BOUND
from gradprune.joint import JointGraph
from gradprune.passes.affine import EVERY, Affine, Atom, Looked, size_of
from gradprune.passes.domain import Key, Need, Needs, Value
from gradprune.passes.flow import ROW, Flow

Node = torch.fx.Node
Tensors = Mapping[str, torch.Tensor]


VIEWS = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}


class Unsound(AssertionError):
    """The analysis claims something that is not so."""


class Recorder(torch.fx.Interpreter):
    """Runs a graph and keeps the value of each node."""

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self.found: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        self.found[n] = super().run_node(n)
        return self.found[n]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        # A trace reads originals instead of copies, so an operand may have other strides than it had.
        return super().call_function(VIEWS.get(target, target), args, kwargs)


def run_graph(joint: JointGraph, tensors: Tensors, tangent: float = 1.0) -> dict[Node, Any]:
    """The value of each node for these inputs by name.

    Raises RuntimeError where a kernel lays out its result otherwise than the trace, so that elements of a gradient that
    was to be laid out like it would share memory: autograd itself, of the real layout, makes no such gradient.
    """
    placeholders = [node for node in joint.graph_module.graph.nodes if node.op == "placeholder"]
    named = {item.node: tensors.get(item.name) for item in joint.inputs}
    tangents = {item.node for item in joint.inputs if item.role == "tangent"}
    arguments = [torch.tensor(tangent) if node in tangents else named[node] for node in placeholders]
    recorder = Recorder(joint.graph_module)
    torch.manual_seed(0)
    recorder.run(*arguments)
    for node, value in recorder.found.items():
        if node.target is torch.ops.aten.new_empty_strided.default and _overlaps(value):
            raise RuntimeError(f"{node} overlaps itself")
    return recorder.found


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether a tensor has more elements than it reaches places."""
    places = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.numel() > places


def symbol_values(values: Mapping[Node, Any]) -> dict[sympy.Symbol, int]:
    """What each symbol of a size is in this run: read off the shapes of all nodes."""
    found: dict[sympy.Symbol, int] = {}
    for node, value in values.items():
        meta = node.meta.get("val")
        if isinstance(meta, torch.SymInt) and isinstance(value, int):
            _note(found, size_of(meta), value)
        if isinstance(meta, torch.Tensor) and isinstance(value, torch.Tensor):
            for size, real in zip(meta.shape, value.shape, strict=True):
                _note(found, size_of(size), real)
    return found


def _note(found: dict[sympy.Symbol, int], size: Any, real: int) -> None:
    if isinstance(size, sympy.Symbol):
        found[size] = real


def holds(need: Need, values: Mapping[Node, Any]) -> bool:
    value = torch.as_tensor(values[need.node])
    return {
        "finite": lambda: bool(value.isfinite().all()),
        "notnan": lambda: not value.isnan().any(),
        "nonzero": lambda: bool((value != 0).all()),
        "nonempty": lambda: value.numel() > 0,
        "bounded": lambda: bool((value.abs() <= BOUND).all()),
    }[need.kind]()


@dataclass
class Checker:
    """Checks the claims of one run of the analysis on one set of inputs. `count`: how many were checked."""

    flow: Flow
    values: Mapping[Node, Any]
    factors: Tensors
    count: int = 0
    symbols: Mapping[sympy.Symbol, int] = field(default_factory=dict)

    def check(self, nodes: Iterable[Node] | None = None) -> int:
        self.symbols = symbol_values(self.values)
        self.factors = {**self.factors, ROW: live_rows(self.factors)}
        for node in self.flow.values if nodes is None else nodes:
            claims, real = self.flow.values[node], self.values.get(node)
            several = isinstance(claims, tuple)
            for claim, value in zip(claims, real, strict=True) if several else [(claims, real)]:
                if isinstance(claim, Value) and isinstance(value, torch.Tensor | int | float):
                    self._check(node, claim, torch.as_tensor(value))
        return self.count

    def _check(self, node: Node, claim: Value, real: torch.Tensor) -> None:
        if len(claim.dims) != real.dim():
            raise Unsound(f"{node.format_node()}: {len(claim.dims)} dims claimed, there are {real.dim()}")
        self._check_bounds(node, claim, real)
        if claim.const is not None and self._all_hold(claim.const.needs):
            self._require(node, bool((real == claim.const.value).all()), f"constant {claim.const.value}", real)
        if not claim.facts or real.numel() == 0:
            return
        grid = self._grid(claim, real.shape)
        for key, known in claim.facts.items():
            if self._all_hold(known.needs):
                wrong = self._premise(key, grid, real.shape) & (real != known.value)
                self._require(node, not wrong.any(), f"{known.value} where {key}", real)

    def _check_bounds(self, node: Node, claim: Value, real: torch.Tensor) -> None:
        if real.is_complex() or real.numel() == 0:
            return
        numbers = real.double()
        known = numbers[~numbers.isnan()]
        low, high = claim.bounds
        self._require(node, bool(((known >= low) & (known <= high)).all()), f"bounds {claim.bounds}", real)
        if claim.notnan:
            self._require(node, not numbers.isnan().any(), "not NaN", real)
        if claim.reach is not None and self._all_hold(claim.reach.needs):
            self._require(node, bool((numbers.abs() <= claim.reach.limit).all()), f"reach {claim.reach}", real)

    def _require(self, node: Node, true: bool, claim: str, real: torch.Tensor) -> None:
        self.count += 1
        if not true:
            raise Unsound(f"{node.format_node()} claims {claim}, but is {real.flatten()[:12].tolist()}")

    def _all_hold(self, needs: Needs) -> bool:
        return all(holds(need, self.values) for need in needs)

    def _size(self, size: Any) -> int:
        return size if isinstance(size, int) else int(size.subs(self.symbols))

    def _grid(self, claim: Value, shape: Sequence[int]) -> dict[Atom, torch.Tensor]:
        """The value of each atom at each position."""
        grid: dict[Atom, torch.Tensor] = {}
        for place, group in enumerate(claim.dims):
            index = torch.arange(shape[place]).view([-1 if k == place else 1 for k in range(len(shape))])
            rest = index.expand(*shape) if shape else index
            for atom in reversed(group):
                size = self._size(atom.size)
                grid[atom], rest = rest % size, rest // size
            if group and bool((rest != 0).any()):
                raise Unsound(f"the atoms {group} do not cover a dimension of size {shape[place]}")
        return grid

    def _premise(self, key: Key, grid: Mapping[Atom, torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """Where the factor is zero at the key's indices, or these are out of its range."""
        factor = self.factors[key.factor]
        live = factor != 0
        exact = []
        for dim, index in reversed(list(enumerate(key.indices))):
            if index is EVERY:
                live = live.any(dim)
            else:
                exact.insert(0, index)
        inside = torch.ones(tuple(shape), dtype=torch.bool)
        clamped = []
        for index, size in zip(exact, live.shape, strict=True):
            place = self._evaluate(index, grid, shape)
            inside &= (place >= 0) & (place < size)
            clamped.append(place.clamp(0, max(size - 1, 0)))
        if 0 in live.shape:
            return torch.ones(tuple(shape), dtype=torch.bool)
        return ~inside | ~(live[tuple(clamped)] if clamped else live.expand(tuple(shape)))

    def _evaluate(self, index: Affine, grid: Mapping[Atom, torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        result = torch.full(tuple(shape), self._size(index.offset), dtype=torch.long)
        for atom, coefficient in index.terms:
            place = self._looked_up(atom, grid, shape) if isinstance(atom, Looked) else grid[atom]
            result = result + self._size(coefficient) * place
        return result

    def _looked_up(self, atom: Looked, grid: Mapping[Atom, torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """What stands at the place that is looked at; where that is outside, so is what depends on it."""
        numbers, inside = self.values[atom.node], torch.ones(tuple(shape), dtype=torch.bool)
        at = []
        for index, size in zip(atom.at, numbers.shape):
            place = self._evaluate(index, grid, shape)
            inside &= (place >= 0) & (place < size)
            at.append(place.clamp(0, size - 1))
        found = numbers[tuple(at)] if at else numbers.expand(tuple(shape))
        found = torch.where(found < 0, found + self._size(atom.extent), found)
        return torch.where(inside, found // self._size(atom.stride) % self._size(atom.size), _OUTSIDE)


_OUTSIDE = -(2**40)


def live_rows(factors: Tensors) -> torch.Tensor:
    """For each row whether the product of the factors is anywhere not zero in it."""
    rank = max(factor.dim() for factor in factors.values())
    product = torch.ones((), dtype=torch.bool)
    for factor in factors.values():
        product = product & (factor != 0).reshape(factor.shape + (1,) * (rank - factor.dim()))
    return product.flatten(1).any(1) if product.dim() > 1 else product


def check_rows(flow: Flow, before: Mapping[Node, Any], after: Mapping[Node, Any], row: int) -> int:
    """Check that only what claims to depend on `row` changed between two runs that differ in that row's data."""
    count = 0
    checker = Checker(flow, before, {})
    checker.symbols = symbol_values(before)
    for node, claims in flow.values.items():
        pairs = (
            zip(claims, before[node], after[node])
            if isinstance(claims, tuple)
            else [(claims, before[node], after[node])]
        )
        for claim, one, two in pairs:
            if not isinstance(claim, Value) or claim.rows is EVERY or not isinstance(one, torch.Tensor | int | float):
                continue
            one, two = torch.as_tensor(one), torch.as_tensor(two)
            changed = ~((one == two) | (one.isnan() & two.isnan()))
            if claim.rows is not None and one.numel():
                index = checker._evaluate(claim.rows, checker._grid(claim, one.shape), one.shape)
                changed &= index != row
            count += 1
            if changed.any():
                raise Unsound(f"{node.format_node()} claims to read row {claim.rows}, but row {row} changes it")
    return count
