"""Programs for the tracer, and the check that a traced graph computes what the program computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradprune.joint import JointGraph
from gradprune.trace import trace_joint
from tests.call_watch import CallWatch

ROWS, TOKENS, WORDS = 4, 6, 11


def example(seed: int = 0, rows: int = ROWS, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """Inputs of a policy loss, by name, in double precision."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    mask = (torch.rand(rows, tokens, generator=generator) > 0.3).double()
    mask[:, 0] = 1
    return {
        "logp": normal(rows, tokens),
        "old": normal(rows, tokens),
        "ref": normal(rows, tokens),
        "adv": normal(rows),
        "mask": mask,
        "logits": normal(rows, tokens, WORDS),
        "labels": torch.randint(0, WORDS, (rows, tokens), generator=generator),
    }


Result = tuple[torch.Tensor, dict[str, torch.Tensor]]
WRT = ("logp", "logits")


def inputs_of(program: Callable[..., Any], values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: values[name] for name in inspect.signature(program).parameters}


def trace(
    program: Callable[..., Any], values: Mapping[str, torch.Tensor] | None = None, max_paths: int = 64
) -> tuple[JointGraph, ...]:
    given = inputs_of(program, values or example())
    return trace_joint(program, list(given.values()), names=list(given), wrt=WRT, max_paths=max_paths)


def run(
    program: Callable[..., Any], values: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a real run and its gradients; zeros where there is none."""
    given = inputs_of(program, values)
    leaves = {name: given[name].clone().requires_grad_() for name in given if name in WRT}
    loss = _loss(program(*{**given, **{name: leaf * 1 for name, leaf in leaves.items()}}.values()))
    grads = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    if loss.requires_grad:
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        grads |= {name: grad for name, grad in zip(leaves, found) if grad is not None}
    return loss.detach(), grads


def watch(program: Callable[..., Any], joints: tuple[JointGraph, ...], values: Mapping[str, torch.Tensor]) -> CallWatch:
    """A real run, compared with the recorded paths."""
    given = inputs_of(program, values)
    given = {name: value * 1 if name in WRT else value for name, value in grown(given).items()}
    comparison = CallWatch([joint.stream for joint in joints], given)
    with comparison:
        program(*given.values())
    comparison.finish()
    return comparison


def grown(given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone().requires_grad_() if name in WRT else value for name, value in given.items()}


def replay(
    joint: JointGraph, values: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor] | None = None
) -> Result:
    """The loss and the gradients that a traced graph computes."""
    known: dict[str, Any] = {**values, **(state or {}), "loss": torch.ones((), dtype=torch.float64)}
    by_node = {item.node: known[item.name] for item in joint.inputs}
    graph = joint.graph_module.graph
    args = [by_node[node] for node in graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        loss, *grads = joint.graph_module(*args)
    zeros = {name: torch.zeros_like(values[name]) for name in joint.gradients}
    return loss, {name: zeros[name] if grad is None else grad for name, grad in zip(zeros, grads)}


def _loss(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        return output["loss"]
    return output[0] if isinstance(output, tuple) else output


def assert_faithful(
    program: Callable[..., Any],
    joints: tuple[JointGraph, ...],
    values: Mapping[str, torch.Tensor],
    **state: torch.Tensor,
) -> JointGraph:
    """The path that a real run follows computes the run's loss and gradients. Returns the path.

    Decomposed operators round in another order than the kernels, so numbers agree to the last digits of a double only.
    """
    comparison = watch(program, joints, values)
    assert comparison.matched is not None, comparison.difference
    joint = joints[comparison.matched]
    expected_loss, expected = run(program, values)
    loss, grads = replay(joint, inputs_of(program, values), state)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=1e-12)
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-10, atol=1e-12, msg=f"gradient of {name}")
    return joint
