"""Operators that hand on what is not finite: none of its elements is lost in the result."""

from __future__ import annotations

from typing import Final

import torch
import torch.fx

Node = torch.fx.Node

_SPREADING: Final = frozenset(
    "add sub rsub mul neg sum mean cumsum view _unsafe_view reshape permute transpose t unsqueeze squeeze expand clone"
    " alias detach cat stack mm bmm addmm log sqrt square abs _log_softmax native_layer_norm".split()
)
"""Operators whose result is not finite if any element of any operand is not."""
_SPREADING_FIRST: Final = frozenset(["div"])
"""The same for their first operand only."""


def spreading_operands(node: Node) -> list[Node]:
    """The operands of `node` that make its result not finite if any element of them is not."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or may_be_empty(node):
        return []
    name = node.target._opname
    if node.kwargs.get("beta", 1) == 0:
        return []
    if name == "_to_copy":
        return node.all_input_nodes if node.meta["val"].is_floating_point() else []
    if name in _SPREADING_FIRST:
        return [node.args[0]] if isinstance(node.args[0], Node) else []
    return node.all_input_nodes if name in _SPREADING else []


def may_be_empty(node: Node) -> bool:
    """Whether the result may have no elements, so that its being finite says nothing."""
    meta = node.meta["val"]
    meta = meta[0] if isinstance(meta, tuple | list) else meta
    if not isinstance(meta, torch.Tensor):
        return True
    return any(
        size == 0 if isinstance(size, int) else any(s.name.startswith("u") for s in size.node.expr.free_symbols)
        for size in meta.shape
    )
