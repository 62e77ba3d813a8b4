"""Edit: the joint graph of a dead microbatch becomes its forward, and gradients that are zeros."""

from __future__ import annotations

import torch
import torch.fx

from gradprune.joint import JointGraph

aten = torch.ops.aten


def drop_backward(joint: JointGraph) -> torch.fx.GraphModule:
    """The joint graph with zeros of the inputs' shapes for gradients, and nothing left that no output reads.

    Only for a microbatch of which a certificate and the plan together say that it is dead. Inputs and outputs keep
    their order: the loss, then one gradient for each ``wrt`` input. The joint graph itself is not changed.
    """
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    outputs = graph.graph_copy(joint.graph_module.graph, copies)
    inputs = {item.name: copies[item.node] for item in joint.inputs}
    zeros = {copies[node]: inputs[name] for name, node in joint.gradients.items() if node is not None}

    def replaced(node: torch.fx.Node) -> torch.fx.Node:
        if node not in zeros:
            return node
        zero = graph.call_function(aten.zeros_like.default, (zeros[node],))
        zero.meta = dict(node.meta)
        return zero

    graph.output(torch.fx.node.map_arg(outputs, replaced))
    drop_unread(graph)
    graph.lint()
    return torch.fx.GraphModule(joint.graph_module, graph)


def drop_unread(graph: torch.fx.Graph) -> None:
    """Erase every operator that no output reads; inputs stay."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
