"""Analysis: which inputs neither the loss nor any gradient reads, because a constant of the program cuts them off.

A reference log-prob times a coefficient that is 0 is read by nobody, if it is finite; nor is the forward that made it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx

from gradprune.facts import Condition, Hypothesis
from gradprune.joint import JointGraph
from gradprune.passes.conditions import conditions
from gradprune.passes.domain import NO_NEEDS, Needs, Value
from gradprune.passes.flow import Flow
from gradprune.passes.zero_flow import Program


@dataclass(frozen=True)
class Unread:
    """Inputs, by name, that no result depends on where `conditions` hold."""

    names: tuple[str, ...]
    conditions: tuple[Condition, ...]


def unread_inputs(joint: JointGraph) -> Unread:
    """The inputs of a joint graph of which neither its loss nor a gradient needs the elements; sizes may be read."""
    program = Program.of(joint, {}, Hypothesis(()))
    read, needs = _read(program.run(rowwise=False, whole=True), joint)
    names = tuple(item.name for item in joint.inputs if item.role != "tangent" and item.node not in read)
    return Unread(names, conditions(needs, joint.graph_module.graph, program.names, program.necessity()))


def _read(flow: Flow, joint: JointGraph) -> tuple[set[torch.fx.Node], Needs]:
    """The nodes whose elements matter to an output, and what makes the constants on the way constant."""
    (output,) = (node for node in joint.graph_module.graph.nodes if node.op == "output")
    read: set[torch.fx.Node] = set()
    needs = NO_NEEDS
    queue = list(output.all_input_nodes)
    while queue:
        node = queue.pop()
        if node in read:
            continue
        read.add(node)
        value = flow.values.get(node)
        if isinstance(value, Value) and value.const is not None:
            needs |= value.const.needs
        elif isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            queue += node.all_input_nodes
    return read, needs
