"""The graph of a dead microbatch is the forward without gradient, operator for operator, with zeros for gradients."""

from __future__ import annotations

import pytest
import torch

from gradprune.joint import JointGraph
from gradprune.passes.dead_backward import drop_backward
from gradprune.trace import trace_joint
from tests.passes import losses
from tests.passes.batches import Batch, draw
from tests.passes.claims import Recorder

NAMES = ("grpo", "gspo", "cispo", "grpo_on_logits", "put_in_place", "half_precision", "metrics_beside", "dapo_selected")


def traced(loss: losses.Loss, name: str, batch: Batch) -> JointGraph:
    return trace_joint(loss, tuple(batch.values()), names=tuple(batch), wrt=(next(iter(batch)),))[0]


def operators(graph_module: torch.fx.GraphModule) -> list[str]:
    return sorted(str(node.target) for node in graph_module.graph.nodes if node.op == "call_function")


def without_gradient(loss: losses.Loss) -> losses.Loss:
    def forward(*tensors: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return loss(*tensors)

    return forward


@pytest.mark.parametrize("name", NAMES)
def test_leaves_the_forward(name: str) -> None:
    batch = draw(name, 3)
    joint = traced(losses.ZERO[name], name, batch)
    before = len(joint.graph_module.graph.nodes)
    dead = drop_backward(joint)
    assert len(joint.graph_module.graph.nodes) == before
    forward = operators(traced(without_gradient(losses.ZERO[name]), name, batch).graph_module)
    assert operators(dead) == sorted([*forward, "aten.zeros_like.default"])
    assert not any("call" not in node.meta for node in dead.graph.nodes if node.target in joint_targets(joint))


def joint_targets(joint: JointGraph) -> set[object]:
    """Operators that only the backward of this joint graph has."""
    nodes = [node for node in joint.graph_module.graph.nodes if node.op == "call_function"]
    forward = {node.target for node in nodes if "call" in node.meta}
    return {node.target for node in nodes} - forward - {torch.ops.aten.zeros_like.default, torch.ops.aten.sym_size.int}


@pytest.mark.parametrize("name", NAMES)
def test_computes_the_loss_and_zeros(name: str) -> None:
    batch = draw(name, 3)
    dead = drop_backward(traced(losses.ZERO[name], name, batch))
    loss, gradient = Recorder(dead).run(*batch.values(), torch.ones(()))
    assert torch.equal(loss, losses.ZERO[name](*batch.values()))
    assert torch.equal(gradient, torch.zeros_like(next(iter(batch.values()))))


def test_keeps_the_backward_of_the_joint_graph_itself() -> None:
    batch = draw("grpo", 3)
    joint = traced(losses.ZERO["grpo"], "grpo", batch)
    drop_backward(joint)
    assert any("call" not in node.meta for node in joint.graph_module.graph.nodes if node.op == "call_function")


def test_gives_none_where_nothing_was_reached() -> None:
    joint = trace_joint(lambda x, y: (y * y).sum(), (torch.ones(3), torch.ones(3)), names=("x", "y"), wrt=("x", "y"))[0]
    dead = drop_backward(joint)
    loss, of_x, of_y = Recorder(dead).run(torch.ones(3), torch.full((3,), 2.0), torch.ones(()))
    assert of_x is None
    assert torch.equal(of_y, torch.zeros(3))
    assert torch.equal(loss, torch.tensor(12.0))
