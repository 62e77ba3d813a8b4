"""Why a gradient is not proved zero: the lines through which it flows, the most telling first.

A live term joins where an operator adds, or chooses between, a term that a zero factor silences and one that it does
not. A factor is lost where an operand was zero with it and the result is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
import torch.fx

from gradprune.facts import Reason, ReasonKind, SourceLine
from gradprune.joint import TracedInput
from gradprune.passes.affine import EVERY
from gradprune.passes.domain import Value
from gradprune.passes.flow import Flow

Node = torch.fx.Node

MOST_REASONS: Final = 8
MOST_REACHING: Final = 3
_MIXING: Final = frozenset(
    "add sub rsub where cat stack index_put _unsafe_index_put scatter scatter_add slice_scatter select_scatter"
    " masked_scatter maximum minimum lerp index_add index_copy".split()
)

_ADDING: Final = frozenset("add sub rsub where maximum minimum".split())


def reasons(flow: Flow, gradients: Mapping[str, Node], inputs: Sequence[TracedInput]) -> tuple[Reason, ...]:
    """Reasons for gradients, by input name, that are not proved zero. `flow` has evaluated the whole graph."""
    found: dict[Reason, None] = {}
    reaching: dict[Reason, None] = {}
    for name, node in gradients.items():
        if len(found) < MOST_REASONS:
            explanation = _Explanation(flow, name, node, inputs)
            found |= dict.fromkeys(explanation.reasons())
            reaching |= dict.fromkeys(explanation.reaching_lines())
    return (*tuple(found)[:MOST_REASONS], *tuple(reaching)[:MOST_REACHING])


@dataclass(frozen=True)
class _Explanation:
    flow: Flow
    name: str
    gradient: Node
    inputs: Sequence[TracedInput]

    def reasons(self) -> Iterator[Reason]:
        yield from self.added_by_backward()
        yield from self.without_rule_on_path()
        yield from self.joining_terms()
        yield from self.not_finite()
        yield from self.without_rule_elsewhere()
        yield from self.lost_factors()
        yield from self.misaligned()

    # -- what the gradient flows through -------------------------------------------------------------------------

    @cached_property
    def path(self) -> tuple[Node, ...]:
        """The cotangents that are not zero and flow into the gradient, in program order."""
        flow, found, queue = self.flow, set(), [self.gradient]
        while queue:
            node = queue.pop()
            if node not in found and node in flow.cotangents and not self._is_zero(node):
                found.add(node)
                queue += node.all_input_nodes
        return tuple(node for node in flow.values if node in found and node.op == "call_function")

    @cached_property
    def weights(self) -> frozenset[Node]:
        """Everything that the operands which the path meets are computed from."""
        queue = [source for node in self.path for source in node.all_input_nodes if source not in self.flow.cotangents]
        found: set[Node] = set()
        while queue:
            node = queue.pop()
            if node not in found:
                found.add(node)
                queue += node.all_input_nodes
        return frozenset(found)

    @cached_property
    def of_model(self) -> frozenset[Node]:
        """What depends on the model's output."""
        found = {item.node for item in self.inputs if item.role == "wrt"}
        for node in self.flow.values:
            if any(source in found for source in node.all_input_nodes):
                found.add(node)
        return frozenset(found)

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """The factors that do not make the gradient zero position by position."""
        value = self.flow.values[self.gradient]
        have = {
            key.factor
            for key, known in value.facts.items()
            if known.value == 0 and not any(i is EVERY for i in key.indices)
        }
        return tuple(factor for factor in self.flow.clause.axes if factor not in have)

    @cached_property
    def lines(self) -> frozenset[tuple[str, int]]:
        return frozenset((w.file, w.line) for node in self.path if (w := node.meta.get("where")) is not None)

    def _value(self, node: Node) -> Value | None:
        """The node's value, or that of its first result."""
        value = self.flow.values.get(node)
        value = value[0] if isinstance(value, tuple) else value
        return value if isinstance(value, Value) else None

    def _is_zero(self, node: Node) -> bool:
        value = self._value(node)
        return value is not None and value.is_zero()

    def _zero_with(self, node: Node, factor: str) -> bool:
        """Whether the value is zero where the factor is, at some or at all positions."""
        value = self._value(node)
        if value is None:
            return False
        if value.is_zero():
            return node in self._data_dependent
        return any(key.factor == factor and known.value == 0 for key, known in value.facts.items())

    @cached_property
    def _data_dependent(self) -> frozenset[Node]:
        """What is computed from elements of a factor: a zero among these is not just a number of the program."""
        found = {node for node, value in self.flow.sources.items() if self._is_factor(value)}
        for node in self.flow.values:
            made = _opname(node).removesuffix("_like").removeprefix("new_") in ("full", "zeros", "ones", "empty")
            if not made and _is_tensor(node) and any(source in found for source in node.all_input_nodes):
                found.add(node)
        return frozenset(found)

    def _is_factor(self, source: Value) -> bool:
        return any(key.factor in self.flow.clause.axes for key in source.facts)

    # -- reasons -------------------------------------------------------------------------------------------------

    def added_by_backward(self) -> Iterator[Reason]:
        """Where a backward makes a gradient out of zero cotangents: a custom function or a hook."""
        for node in self.path:
            cotangents = [source for source in node.all_input_nodes if source in self.flow.cotangents]
            born = all(self._is_zero(source) for source in cotangents) and node not in self.flow.unruled
            if born and _opname(node) in _ADDING:
                yield _reason("live-term", "the backward of this line adds gradient of its own", self._origin(node))

    def _origin(self, node: Node) -> Node:
        """The first step of the backward, in program order, of what `node` adds to zero cotangents."""
        found, queue = {node}, [node]
        while queue:
            for source in queue.pop().all_input_nodes:
                if source in self.flow.backward and source not in self.flow.cotangents and source not in found:
                    found.add(source)
                    queue.append(source)
        lines = (step for step in self.flow.values if step in found and _is_tensor(step) and step.meta.get("where"))
        return next(lines, node)

    def without_rule_on_path(self) -> Iterator[Reason]:
        """A backward operator without a rule, whose every cotangent is zero."""
        for node in self.path:
            cotangents = [source for source in node.all_input_nodes if source in self.flow.cotangents]
            if node in self.flow.unruled and cotangents and all(self._is_zero(source) for source in cotangents):
                yield self._no_rule(node)

    def _no_rule(self, node: Node) -> Reason:
        return _reason("no-rule", f"kept: no rule for {self.flow.unruled[node]}", node)

    def joining_terms(self) -> Iterator[Reason]:
        found = [node for node in self._losing() if self._joins(node)]
        for node in self._nearest(found):
            factors = [factor for factor in self.missing if self._loses(node, factor)]
            yield _reason("live-term", f"a term joins that {_names(factors)} does not multiply", node)

    def _joins(self, node: Node) -> bool:
        return _opname(node) in _MIXING and any(
            source in self.of_model and not any(self._zero_with(source, factor) for factor in self.missing)
            for source in _terms(node)
        )

    def _losing(self) -> list[Node]:
        """Forward nodes that lose a missing factor: of the loss itself, or of what weighs the gradient."""
        candidates = (
            node for node in self.flow.values if node not in self.flow.cotangents and node.op == "call_function"
        )
        return [
            node
            for node in candidates
            if (node in self.weights or node in self.of_model) and any(self._loses(node, f) for f in self.missing)
        ]

    def _loses(self, node: Node, factor: str) -> bool:
        if self._zero_with(node, factor) or not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        return any(self._zero_with(source, factor) for source in _terms(node))

    def _nearest(self, nodes: Sequence[Node]) -> list[Node]:
        """Those on a line through which the gradient flows come first."""
        return sorted(nodes, key=lambda node: not self._is_on_path(node))

    def _is_on_path(self, node: Node) -> bool:
        where = node.meta.get("where")
        return where is not None and (where.file, where.line) in self.lines

    def not_finite(self) -> Iterator[Reason]:
        """Where a value that is never finite is born."""
        for node, value in self.flow.values.items():
            if not (isinstance(value, Value) and value.broken) or not (node in self.weights or node in self.path):
                continue
            sources = (self.flow.values.get(source) for source in node.all_input_nodes)
            if not any(isinstance(source, Value) and source.broken for source in sources):
                yield _reason(
                    "non-finite", "never finite here: 0 / 0, x / 0 or an empty mean under the hypothesis", node
                )

    def without_rule_elsewhere(self) -> Iterator[Reason]:
        """Operators without a rule through which a factor went into a weight, or which the gradient flows through."""
        for node in self.flow.unruled:
            sources = node.all_input_nodes
            lossy = node in self.weights and any(self._zero_with(s, f) for s in sources for f in self.missing)
            if lossy or node in self.path:
                yield self._no_rule(node)

    def lost_factors(self) -> Iterator[Reason]:
        """Where a factor's zero goes, first in the data that weighs the gradient."""
        found = [node for node in self._losing() if not self._joins(node) and node not in self.flow.unruled]
        relevant = [node for node in found if node in self.weights or self._is_on_path(node)]
        for node in self._nearest(relevant)[:3]:
            factor = next(factor for factor in self.missing if self._loses(node, factor))
            yield _reason("lost-factor", self._how_lost(node, factor), node)
        for node in self.flow.values:
            if node in self.weights:
                for factor in self.missing:
                    if self._merges(node, factor):
                        yield _reason("lost-factor", f"{factor!r} is merged over positions", node)

    def _how_lost(self, node: Node, factor: str) -> str:
        value = self.flow.values[node]
        numbers = {known.value for key, known in value.facts.items() if key.factor == factor}
        if value.const is not None:
            numbers.add(value.const.value)
        if numbers:
            return f"this equals {min(numbers):g}, not 0, where {factor!r} is 0"
        return f"the zero of {factor!r} is lost"

    def _merges(self, node: Node, factor: str) -> bool:
        """Whether operands are zero with the factor position by position, and the result only with all of it."""
        sources = [self._positions(source, factor) for source in node.all_input_nodes]
        return self._positions(node, factor) is False and any(sources)

    def _positions(self, node: Node, factor: str) -> bool | None:
        """Whether zeros of the factor are known position by position; None where there are none."""
        value = self._value(node)
        facts = value.facts if value is not None else {}
        keys = [key for key, known in facts.items() if key.factor == factor and known.value == 0]
        return any(not any(index is EVERY for index in key.indices) for key in keys) if keys else None

    def misaligned(self) -> Iterator[Reason]:
        if self.missing:
            return
        for node in self.path:
            value = self.flow.values[node]
            keys = [key for key, known in value.facts.items() if known.value == 0]
            if {key.factor for key in keys} >= set(self.flow.clause.axes):
                positions = ", ".join(f"{key.factor}[{', '.join(map(str, key.indices))}]" for key in keys)
                yield _reason("misaligned", f"factors meet at different positions: {positions}", node)
                return

    def reaching_lines(self) -> Iterator[Reason]:
        silent = [factor for factor in self.missing if not any(self._zero_with(w, factor) for w in self.weights)]
        why = f", and {_names(silent)} never multiplies it" if silent else ""
        for node in self._addends(self.gradient):
            yield _reason("live-term", f"gradient reaches {self.name!r} from here{why}", node)

    def _addends(self, node: Node) -> list[Node]:
        """The live terms that are added up to the gradient, last made first."""
        cotangents = [source for source in node.all_input_nodes if source in self.flow.cotangents]
        if _opname(node) == "add" and len(cotangents) == 2:
            return [addend for source in cotangents if source in self.path for addend in self._addends(source)]
        return [node]


def _reason(kind: ReasonKind, message: str, node: Node) -> Reason:
    where: SourceLine | None = node.meta.get("where")
    return Reason(kind, message, where)


def _opname(node: Node) -> str:
    return str(getattr(node.target, "_opname", ""))


def _terms(node: Node) -> list[Node]:
    """The operands whose elements the result is made of: not a condition, an index or a mask."""
    operands: list[Any] = node.all_input_nodes
    return [source for source in operands if _is_float(source)] if _opname(node) in _MIXING else operands


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_float(node: Node) -> bool:
    meta = node.meta.get("val")
    return isinstance(meta, torch.Tensor) and meta.is_floating_point()


def _names(factors: Sequence[str]) -> str:
    return " or ".join(repr(factor) for factor in factors) or "a factor"
