"""Zero flow: does a zero factor reach every gradient? Abstract interpretation of a joint graph; edits nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.fx

import gradprune.passes.rules  # noqa: F401  registers every rule
from gradprune.errors import PruneError
from gradprune.facts import Certificate, Hypothesis, Refusal
from gradprune.joint import JointGraph, TracedInput
from gradprune.passes.affine import EVERY, Affine, Index, Size, flattened, groups_of, product, same_size, size_of
from gradprune.passes.conditions import conditions
from gradprune.passes.domain import NO_NEEDS, Key, Known, Need, Needs, Value, unknown
from gradprune.passes.explain import reasons
from gradprune.passes.flow import ROW, TANGENT, Clause, Flow
from gradprune.passes.necessity import Necessity

Node = torch.fx.Node


def analyse(
    joint: JointGraph, factors: Mapping[str, str], *, hypothesis: Hypothesis, subject: str = ""
) -> Certificate | Refusal:
    """Prove that under `hypothesis` every gradient of the joint graph is exactly zero, or say why not.

    factors: factor of the hypothesis -> name of the traced input that carries it. A factor that the program does not
        read may be left out; it then helps no proof. Factors are aligned at their leading dimensions.
    subject: what the verdict calls the program.
    Raises PruneError where a factor names no input or the factors' shapes cannot be aligned.
    """
    start = time.perf_counter()
    program = Program.of(joint, factors, hypothesis)
    flow = program.run(rowwise=False)
    wrt = tuple(joint.gradients)
    gradients = {name: node for name, node in joint.gradients.items() if node is not None}
    live = {name: node for name, node in gradients.items() if not flow.values[node].is_zero()}
    if live:
        found = reasons(program.run(rowwise=False, whole=True), live, joint.inputs)
        return Refusal(hypothesis, wrt, found, subject, time.perf_counter() - start)
    needs = NO_NEEDS.union(*(_const(flow, node).needs for node in gradients.values()))
    row_needs = program.row_needs(flow)
    per_row = row_needs is not None
    graph = joint.graph_module.graph
    return Certificate(
        hypothesis,
        wrt,
        per_row=per_row,
        conditions=conditions(needs | (row_needs or NO_NEEDS), graph, program.names, program.necessity()),
        operators=sum(node.op == "call_function" for node in graph.nodes),
        unknown=tuple(sorted(set(flow.unruled.values()))),
        symbolic=joint.symbolic,
        subject=subject,
        seconds=time.perf_counter() - start,
    )


def _const(flow: Flow, node: Node) -> Known:
    const = flow.values[node].const
    assert const is not None
    return const


@dataclass(frozen=True)
class Program:
    """A joint graph with its hypothesis, ready to be run."""

    joint: JointGraph
    clause: Clause
    factors: Mapping[Node, str]
    names: Mapping[Node, str]
    rows: Size | None

    @staticmethod
    def of(joint: JointGraph, factors: Mapping[str, str], hypothesis: Hypothesis) -> Program:
        inputs = {item.name: item.node for item in joint.inputs if item.role != "tangent"}
        carriers: dict[Node, str] = {}
        axes: dict[str, tuple[int | None, ...]] = {}
        sizes: dict[int, tuple[str, Size]] = {}
        for factor in hypothesis.factors:
            if factor not in factors:
                axes[factor] = ()
                continue
            node = _carrier(inputs, factor, factors[factor])
            carriers[node] = factor
            axes[factor] = _axes(factor, node, sizes)
        names = {item.node: item.name for item in joint.inputs}
        return Program(joint, Clause(axes), carriers, names, sizes[0][1] if 0 in sizes else None)

    def necessity(self) -> Necessity:
        gradients = (node for node in self.joint.gradients.values() if node is not None)
        return Necessity(gradients, self.factors)

    def run(self, *, rowwise: bool, whole: bool = False) -> Flow:
        """Evaluate what the gradients depend on, or the whole graph."""
        graph_module = self.joint.graph_module
        needed = _ancestors(node for node in self.joint.gradients.values() if node is not None)
        order = [node for node in graph_module.graph.nodes if (node.op != "output" if whole else node in needed)]
        tangents = {item.node for item in self.joint.inputs if item.role == "tangent"}
        backward = frozenset(node for node in order if node.op == "call_function" and "call" not in node.meta)
        cotangents = _dependents(order, tangents)
        sources = {item.node: self._source(item) for item in self.joint.inputs if _is_tensor(item.node)}
        flow = Flow(graph_module, self.clause, sources, backward, cotangents, self.joint.shape_env, rowwise)
        return flow.run(order)

    def _source(self, item: TracedInput) -> Value:
        meta = item.node.meta["val"]
        value = unknown(groups_of(meta.shape), meta.dtype)
        if item.role == "tangent":
            return replace(value, bounds=(-TANGENT, TANGENT), notnan=True, rows=None)
        factor = self.factors.get(item.node)
        value = replace(value, rows=None if item.role == "state" else self._row_read(value, factor))
        if factor is None:
            return value
        key = Key(factor, tuple(flattened(group) if group else Affine(0) for group in value.dims))
        return replace(value, facts={key: Known(0)})

    def _row_read(self, value: Value, factor: str | None) -> Index | None:
        """Data of one row each where the leading size is that of the factors; a single number belongs to no row."""
        if not any(value.dims):
            return None
        leading = value.dims[0]
        sized = self.rows is not None and same_size(product(atom.size for atom in leading), self.rows)
        aligned = factor is not None or sized
        return flattened(leading) if aligned and leading else EVERY

    def row_needs(self, microbatch: Flow) -> Needs | None:
        """What makes the gradient of each dead row zero, and other rows' independent of it; None if that is not proved.

        A need that holds by itself where every row is dead is left out: a row's values are the same in either place.
        """
        gradients = [node for node in self.joint.gradients.values() if node is not None]
        if self.rows is None or not all(self._is_by_row(node) for node in gradients):
            return None
        flow = self.run(rowwise=True)
        needs: Needs = NO_NEEDS
        for node in gradients:
            value = flow.values[node]
            row = flattened(value.dims[0])
            known = value.at(Key(ROW, (row,)))
            if known is None or known.value != 0 or value.rows not in (None, row):
                return None
            needs |= known.needs
        if any(_fails(microbatch, need) for need in needs):
            return None
        return frozenset(need for need in needs if not _holds(microbatch, need))

    def _is_by_row(self, node: Node) -> bool:
        shape = node.meta["val"].shape
        return len(shape) > 0 and self.rows is not None and same_size(size_of(shape[0]), self.rows)


def _holds(flow: Flow, need: Need) -> bool:
    value = flow.values.get(need.node)
    if not isinstance(value, Value) or need.kind not in ("finite", "notnan"):
        return False
    return value.finite or (value.const is not None and not value.const.needs)


def _fails(flow: Flow, need: Need) -> bool:
    value = flow.values.get(need.node)
    if not isinstance(value, Value):
        return False
    return value.broken or (need.kind == "nonzero" and value.is_zero())


def _carrier(inputs: Mapping[str, Node], factor: str, name: str) -> Node:
    if name not in inputs:
        raise PruneError(
            f"factor {factor!r} is carried by {name!r}, which is not an input; inputs: {', '.join(inputs)}"
        )
    return inputs[name]


def _axes(factor: str, node: Node, sizes: dict[int, tuple[str, Size]]) -> tuple[int | None, ...]:
    """The index axis of each dimension of a factor, None for size 1. Records the size of each axis in `sizes`."""
    axes: list[int | None] = []
    for place, size in enumerate(size_of(s) for s in node.meta["val"].shape):
        axes.append(None if isinstance(size, int) and size == 1 else place)
        if axes[-1] is None:
            continue
        other, known = sizes.setdefault(place, (factor, size))
        if isinstance(size, int) and isinstance(known, int) and size != known:
            raise PruneError(
                f"factors {other!r} and {factor!r} differ in dimension {place}: {known} and {size}. Factors are "
                "aligned at their leading dimensions: name tensors of one layout"
            )
    return tuple(axes)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    seen: set[Node] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node not in seen:
            seen.add(node)
            queue += node.all_input_nodes
    return seen


def _dependents(order: Iterable[Node], roots: Iterable[Node]) -> frozenset[Node]:
    found = set(roots)
    for node in order:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return frozenset(found)
