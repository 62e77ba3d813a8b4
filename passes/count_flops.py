"""Analysis: FLOPs of a joint graph as sympy expressions of its symbolic sizes, by phase. Edits nothing, adds no guard.

The graph holds what the loss and the gradients read: an operator that serves a metric only is not in it, and a
checkpoint is traced without its recomputation. What a step really ran is `gradprune.counting.meter`'s to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx
from torch.utils._pytree import tree_map

from gradprune.counting.rules import (
    EXTRA_FORMULAS,
    FIRST_FACTOR,
    PACKED_ATTENTION,
    flop_registry,
    packed_attention_flops,
    product_flops,
)
from gradprune.errors import PruneError
from gradprune.flops import Phases
from gradprune.joint import JointGraph


@dataclass(frozen=True)
class GraphFlops:
    """FLOPs of one path of a step.

    recompute: what a hand-written backward runs without reading the cotangent.
    forward, backward, recompute: expressions of integer symbols named for the first input that has that size,
        ``logp[0]``; a size that depends on data keeps the tracer's name. Constants where no size is symbolic.
        Attention over packed sequences depends on their squared lengths, ``squares(offsets)`` for an input of that
        name (else the name of its node); ``pairs(q, k)`` where queries and keys have offsets of their own.
    sizes: every symbolic size of an input -> its expression, ``{"logp[0]": logp[0], "mask[0]": logp[0]}``.
    """

    forward: sympy.Expr
    backward: sympy.Expr
    recompute: sympy.Expr
    sizes: Mapping[str, sympy.Expr]

    @property
    def total(self) -> sympy.Expr:
        return self.forward + self.backward + self.recompute

    def at(self, sizes: Mapping[str, int]) -> Phases:
        """FLOPs at concrete sizes, by name. Raises PruneError where a size is missing."""
        return Phases(*(_evaluate(value, sizes) for value in (self.forward, self.backward, self.recompute)))

    def at_inputs(self, tensors: Mapping[str, torch.Tensor]) -> Phases:
        """FLOPs at the shapes of the inputs, by name, and at the values of the offsets of packed sequences."""
        sizes = {f"{name}[{i}]": size for name, tensor in tensors.items() for i, size in enumerate(tensor.shape)}
        symbols = set().union(*(value.free_symbols for value in (self.forward, self.backward, self.recompute)))
        names = {symbol.name for symbol in symbols}
        offsets = {name: tensor for name, tensor in tensors.items() if tensor.ndim == 1 and not tensor.is_meta}
        for one, first in offsets.items():
            for two, second in offsets.items():
                if _pairs_name(one, two) in names:
                    sizes[_pairs_name(one, two)] = int((first.long().diff() * second.long().diff()).sum())
        return self.at(sizes)


def _evaluate(expression: sympy.Expr, sizes: Mapping[str, int]) -> int:
    value = expression.subs({symbol: sizes[symbol.name] for symbol in expression.free_symbols if symbol.name in sizes})
    if value.free_symbols:
        missing = ", ".join(sorted(symbol.name for symbol in value.free_symbols))
        raise PruneError(f"FLOPs depend on {missing}: give a value for each, such as {{'{missing.split(', ')[0]}': 8}}")
    return int(value)


def _size(value: Any) -> sympy.Expr:
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)


def _pairs_name(queries: str, keys: str) -> str:
    return f"squares({queries})" if queries == keys else f"pairs({queries}, {keys})"


def _shapes(value: Any) -> Any:
    """Tensors and nodes of tensors become tuples of sympy sizes; everything else stays."""
    if isinstance(value, torch.fx.Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        return tuple(_size(size) for size in value.shape)
    return value


def _count_node(node: torch.fx.Node, names: Mapping[torch.fx.Node, str]) -> sympy.Expr:
    packet = getattr(node.target, "overloadpacket", None)
    kernel = getattr(packet, "_qualified_op_name", "")
    if kernel in PACKED_ATTENTION:
        return _count_packed(node, names, *PACKED_ATTENTION[kernel], backward=kernel.endswith("_backward"))
    if packet in FIRST_FACTOR:
        first = FIRST_FACTOR[packet]
        return product_flops(packet, *(_shapes(argument) for argument in node.args[first : first + 2]))
    formula = EXTRA_FORMULAS.get(packet) or flop_registry.get(packet)
    if formula is None:
        return sympy.Integer(0)
    args, kwargs, out = (
        tree_map(_shapes, value, is_leaf=lambda leaf: isinstance(leaf, (torch.fx.Node, torch.Tensor)))
        for value in (node.args, node.kwargs, node.meta.get("val"))
    )
    if packet in EXTRA_FORMULAS:
        return sympy.sympify(formula(*args, **kwargs))
    return sympy.sympify(formula(*args, **kwargs, out_val=out))


_COPIES = {torch.ops.aten._to_copy, torch.ops.aten.detach, torch.ops.aten.clone, torch.ops.aten.alias}


def _name(offsets: Any, names: Mapping[torch.fx.Node, str]) -> str:
    """The input that `offsets` is or copies; else the name of its node."""
    while offsets not in names and getattr(offsets.target, "overloadpacket", None) in _COPIES:
        offsets = offsets.args[0]
    return names.get(offsets, offsets.name)


def _count_packed(
    node: torch.fx.Node, names: Mapping[torch.fx.Node, str], query: int, place: int, *, backward: bool
) -> sympy.Expr:
    query_shape, key_shape, value_shape = (_shapes(argument) for argument in node.args[query : query + 3])
    queries, keys = node.args[place : place + 2]
    if queries is None:  # [rows, tokens, heads, width]: nothing is packed
        pairs = query_shape[0] * query_shape[1] * key_shape[1]
    else:
        pairs = sympy.Symbol(_pairs_name(_name(queries, names), _name(keys, names)), integer=True, positive=True)
    return packed_attention_flops(query_shape, value_shape, pairs, backward=backward)


def _reached(graph: torch.fx.Graph, sources: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    reached = set(sources)
    for node in graph.nodes:
        if any(argument in reached for argument in node.all_input_nodes):
            reached.add(node)
    return reached


def _name_sizes(joint: JointGraph) -> tuple[dict[sympy.Symbol, sympy.Symbol], dict[str, sympy.Expr]]:
    """The tracer's symbols -> symbols named for inputs, and each symbolic size of an input in these."""
    names: dict[sympy.Symbol, sympy.Symbol] = {}
    found: dict[str, sympy.Expr] = {}
    for item in joint.inputs:
        value = item.node.meta.get("val")
        for index, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            expression = _size(size)
            if expression.is_Symbol:
                names.setdefault(expression, sympy.Symbol(f"{item.name}[{index}]", integer=True, positive=True))
            if expression.free_symbols:
                found[f"{item.name}[{index}]"] = expression
    return names, {name: expression.subs(names) for name, expression in found.items()}


def count_flops(joint: JointGraph) -> GraphFlops:
    """FLOPs of the forward, of what depends on the loss's cotangent, and of what the backward runs besides."""
    graph = joint.graph_module.graph
    inputs = {item.node: item.name for item in joint.inputs}
    backward = _reached(graph, (item.node for item in joint.inputs if item.role == "tangent"))
    totals = {phase: sympy.Integer(0) for phase in ("forward", "backward", "recompute")}
    for node in graph.nodes:
        if node.op == "call_function":
            again = node.meta.get("call") is None
            phase = "backward" if node in backward else "recompute" if again else "forward"
            totals[phase] += _count_node(node, inputs)
    names, sizes = _name_sizes(joint)
    return GraphFlops(**{phase: sympy.expand(total.subs(names)) for phase, total in totals.items()}, sizes=sizes)
