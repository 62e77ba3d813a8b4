"""What a traced graph computes: which nodes are equal, and edits that change nothing of it."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
import torch.fx

_COPIES = frozenset(
    (
        torch.ops.aten.alias.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.lift_fresh_copy.default,
    )
)


def read_originals(graph: torch.fx.Graph) -> None:
    """Lets the readers of a copy read the original: in a graph without mutation they are the same value."""
    for node in graph.nodes:
        if _is_copy(node):
            node.replace_all_uses_with(node.args[0])


def _is_copy(node: torch.fx.Node) -> bool:
    """Whether a node has the value and the layout of its first operand: a copy of it, or a slice of all of it."""
    if node.target is torch.ops.aten.slice.Tensor:
        source: Any = node.args[0]
        return len(node.args) < 5 and _sizes(source) == _sizes(node)
    return node.target in _COPIES and not node.kwargs


def _sizes(node: torch.fx.Node) -> list[Any]:
    """The sizes of a node's value as expressions: to compare SymInts would make a guard."""
    return [size.node.expr if isinstance(size, torch.SymInt) else size for size in node.meta["val"].shape]


def drop_unread(graph: torch.fx.Graph, inputs: Container[torch.fx.Node]) -> None:
    """Erases everything but `inputs` that no output reads: metrics, and checks of them."""
    for node in reversed(graph.nodes):
        if not node.users and node.op != "output" and node not in inputs:
            graph.erase_node(node)


class Equality:
    """Tells nodes of a growing graph that compute the same value: same operator, equal operands, no randomness."""

    def __init__(self) -> None:
        self._classes: dict[Any, int] = {}
        self._known: dict[torch.fx.Node, int] = {}

    def of(self, node: torch.fx.Node) -> int:
        """A number that equal nodes share."""
        order, stack = [], [node]
        while stack:
            top = stack.pop()
            if top not in self._known:
                order.append(top)
                stack.extend(top.all_input_nodes)
        for item in reversed(order):
            self._known[item] = self._classes.setdefault(self._key(item), len(self._classes))
        return self._known[node]

    def _key(self, node: torch.fx.Node) -> Any:
        if node.op != "call_function" or _is_random(node.target):
            return node
        if _is_copy(node):
            return self._key(node.args[0])  # type: ignore[arg-type]
        numbered = torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: f"%{self._known[argument]}")
        return (node.target, repr(numbered))


def _is_random(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def autograd_nodes(loss: torch.Tensor) -> list[Any]:
    """The nodes of the autograd graph of `loss`, each once."""
    seen: dict[Any, None] = {}
    stack: list[Any] = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen[node] = None
            stack.extend(following for following, _ in node.next_functions)
    return list(seen)
