"""Edits of a traced graph that change nothing that it computes: what only a trace needs is taken out."""

from __future__ import annotations

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
        if node.target in _COPIES:
            node.replace_all_uses_with(node.args[0])


def drop_unread(graph: torch.fx.Graph) -> None:
    """Erases every operator that no output reads: metrics, and checks of them."""
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
