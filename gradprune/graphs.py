"""Walks over an autograd graph, and what to do where it hides a part."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch


def reached_leaves(loss: torch.Tensor) -> tuple[list[torch.Tensor], bool]:
    """The leaf tensors into which a backward from `loss` would accumulate, each once; and whether there may be more.

    Reentrant checkpointing hides the graph inside a segment.
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
    return list(found.values()), hidden


class Arrivals:
    """Learns from one real backward which of some parameters it reaches, where the graph does not tell.

    `complete` once a backward was listened to. The hooks are on the parameters from `listen` to `close`.
    """

    def __init__(self, candidates: Iterable[torch.Tensor]) -> None:
        self.complete = False
        self._candidates = [weakref.ref(parameter) for parameter in candidates]
        self._arrived: dict[int, weakref.ref[torch.Tensor]] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for ref in self._arrived.values() if (parameter := ref()) is not None]

    def listen(self, loss: torch.Tensor, heard: Callable[[torch.Tensor], None] | None = None) -> None:
        """Listen to the coming backward from `loss`; `heard` gets each gradient that arrives."""
        self._handles.append(loss.register_hook(self._begin))
        for ref in self._candidates:
            parameter = ref()
            if parameter is not None:
                self._handles.append(parameter.register_hook(self._hook(ref, heard)))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _begin(self, cotangent: torch.Tensor) -> None:
        self.complete = True

    def _hook(
        self, ref: weakref.ref[torch.Tensor], heard: Callable[[torch.Tensor], None] | None
    ) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            self._arrived[id(ref())] = ref
            if heard is not None:
                heard(gradient)

        return hook
