"""Walks over an autograd graph."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def reached_leaves(loss: torch.Tensor, modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """The leaf tensors into which a backward from `loss` would accumulate, each once.

    Reentrant checkpointing hides the graph inside a segment: where it was used, every trainable parameter of `modules`
    counts as reached.
    """
    found: dict[int, torch.Tensor] = {}
    hidden = False
    seen = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        hidden = hidden or node.name() == "CheckpointFunctionBackward"
        todo += [following for following, _ in node.next_functions]
    if hidden:
        for module in modules:
            found.update((id(p), p) for p in module.parameters() if p.requires_grad)
    return list(found.values())
