"""The side conditions of a proof, as few as say the same, in words that a reader and a run-time check can use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
import torch.fx

from gradprune.facts import Condition
from gradprune.passes.domain import Need, Needs
from gradprune.passes.flow import SAME_ELEMENTS
from gradprune.passes.necessity import Necessary, Necessity
from gradprune.passes.registry import operator_name
from gradprune.passes.spreading import spreading_operands

Node = torch.fx.Node

_DROPPING: Final = frozenset(["slice", "select"])
"""Of the operators in SAME_ELEMENTS, those that do not keep each element."""
_NAN_TOGETHER: Final = frozenset(["aten._log_softmax.default", "aten._softmax.default"])
"""Operators along whose dimension (their second operand) all of the result is NaN, or none: each element of it has the
sum over the others in it, which is NaN for a NaN or an infinity among them, or if all are minus infinity."""


def minimal(needs: Needs) -> Needs:
    """The needs that the others do not imply."""
    implied: set[Need] = set()
    for need in needs:
        if need.kind == "bounded":
            implied |= {Need("finite", need.node), Need("notnan", need.node)}
        if need.kind == "finite":
            implied.add(Need("notnan", need.node))
            for ancestor in _spreading_ancestors(need.node):
                implied |= {Need("finite", ancestor), Need("notnan", ancestor)}
    return needs - implied


def _spreading_ancestors(node: Node) -> Iterable[Node]:
    seen: set[Node] = set()
    queue = [node]
    while queue:
        for source in spreading_operands(queue.pop()):
            if source not in seen:
                seen.add(source)
                queue.append(source)
    return seen


def forward_twins(graph: torch.fx.Graph) -> Mapping[Node, Node]:
    """Nodes that compute again what an earlier node of the forward has computed."""
    first: dict[Any, Node] = {}
    twins: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        operands = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: twins.get(source, source))
        key = (node.target, repr(operands))
        earlier = first.setdefault(key, node)
        if earlier is not node and "call" in earlier.meta:
            twins[node] = earlier
    return twins


def conditions(
    needs: Needs, graph: torch.fx.Graph, names: Mapping[Node, str], necessity: Necessity
) -> tuple[Condition, ...]:
    """Conditions for `needs`, in program order. names: placeholder -> the user's name for it."""
    twins = forward_twins(graph)
    moved = minimal(frozenset(Need(need.kind, twins.get(need.node, need.node)) for need in needs))
    order = {node: position for position, node in enumerate(graph.nodes)}
    calls = _calls(graph)
    found: dict[Condition, None] = {}
    for need in sorted(moved, key=lambda need: (order[need.node], need.kind)):
        copies = [node for node, twin in twins.items() if twin is need.node]
        found[_condition(need, names, *_place(need.node, calls), necessity.of(need, copies))] = None
    return tuple(found)


def _calls(graph: torch.fx.Graph) -> dict[int, list[Node]]:
    """The nodes that each torch call of the program made, in order."""
    calls: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if "call" in node.meta:
            calls.setdefault(node.meta["call"], []).append(node)
    return calls


def _place(node: Node, calls: Mapping[int, list[Node]]) -> tuple[int | None, str]:
    """In which call the value of `node` can be seen while the program runs, and by which operator: see `Condition`."""
    call = node.meta.get("call")
    if call is None or calls[call][-1] is node:
        return call, ""
    alone = sum(other.target == node.target for other in calls[call]) == 1
    if alone and isinstance(node.target, torch._ops.OpOverload) and isinstance(node.meta["val"], torch.Tensor):
        return call, str(node.target)
    return None, ""


def _condition(need: Need, names: Mapping[Node, str], call: int | None, inside: str, necessary: Necessary) -> Condition:
    where = need.node.meta.get("where")
    together: Any = need.node.args[1] if operator_name(need.node.target) in _NAN_TOGETHER else None
    along = together if need.kind == "notnan" else None
    seen = need.node
    exact, ignoring = necessary
    while (name := getattr(seen.target, "_opname", None)) in SAME_ELEMENTS:
        exact = exact and (call is not None or name not in _DROPPING)  # else the whole input would be looked at
        seen = seen.all_input_nodes[0]
    if seen.op == "placeholder":
        return Condition(need.kind, names.get(seen, seen.name), where, call, inside, None, exact, ignoring)
    value = operator_name(need.node.target).removeprefix("aten.").split(".")[0].strip("_")
    return Condition(need.kind, value, where, call, inside, along, exact, ignoring)
