"""Walks over an autograd graph, and what to learn from a real backward where the graph does not tell."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

#: Packages whose autograd.Functions give a gradient of zero for a cotangent of zero, and the ones that do not.
_LINEAR = ("torch.", "gradprune.", "megatron.core.", "transformer_engine.")
_INJECTING = ("MoEAuxLossAutoScaler", "MTPLossAutoScaler", "DSAIndexerLossAutoScaler")
#: Of torch's own, those that run what others wrote: compiled regions and the backwards of custom operators.
_UNKNOWN = ("torch._functorch.", "torch._library.")


@dataclass(frozen=True)
class Reach:
    """What a backward would come to. leaves: tensors into which it accumulates, each once. hidden: there may be more,
    since reentrant checkpointing hides the graph inside a segment. functions: autograd.Functions of the model of which
    it is not known that they add no gradient of their own. of_loss: the user's autograd.Functions outside the model.
    once: a part outside the model was compiled, whose backward may run but once."""

    leaves: tuple[torch.Tensor, ...]
    hidden: bool
    functions: frozenset[type]
    of_loss: frozenset[type]
    once: bool


def reach_of(loss: torch.Tensor, entrances: Mapping[int, GradientEdge], silent: Container[int] = ()) -> Reach:
    """Walk the graph of `loss`, and that of the model behind those of `entrances` that it comes to: about a microsecond
    a node. silent: entrances that get no gradient."""
    found: dict[int, torch.Tensor] = {}
    gates: dict[Any, bool] = dict.fromkeys((edge.node for edge in entrances.values()), False)
    closed = {edge.node for number, edge in entrances.items() if number in silent}
    closed -= {edge.node for number, edge in entrances.items() if number not in silent}
    seen: set[Any] = set()
    outside = _walk([loss.grad_fn], gates, seen, found)
    inside = _walk([node for node, met in gates.items() if met and node not in closed], {}, seen, found)
    hidden = any(kind.__name__ == "CheckpointFunctionBackward" for kind in inside | outside)
    functions = frozenset(kind for kind in inside if not _is_linear(kind))
    once = any(_module_of(kind).startswith("torch._functorch.") for kind in outside)
    return Reach(tuple(found.values()), hidden, functions, frozenset(filter(_is_of_user, outside)), once)


def _walk(todo: list[Any], gates: dict[Any, bool], seen: set[Any], found: dict[int, torch.Tensor]) -> set[type]:
    """The kinds of node from `todo` on, as far as `gates`, which it marks; leaves go into `found`."""
    kinds: set[type] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if node in gates:
            gates[node] = True
            continue
        seen.add(node)
        kinds.add(type(node))
        following = node.next_functions
        if following:
            todo += [next_node for next_node, _ in following]
        elif (variable := getattr(node, "variable", None)) is not None:
            found[id(variable)] = variable
    return kinds


def _module_of(kind: type) -> str:
    """The module of an autograd.Function by the kind of its node; empty for torch's own operators."""
    function: Any = getattr(kind, "_forward_cls", None)
    return "" if function is None else str(function.__module__)


def _is_of_user(kind: type) -> bool:
    return not _module_of(kind).startswith(("torch.", *_LINEAR)) and _module_of(kind) != ""


def _is_linear(kind: type) -> bool:
    function: Any = getattr(kind, "_forward_cls", None)
    if function is None:
        return True  # torch's own operators
    if function.__name__ in _INJECTING or function.__module__.startswith(_UNKNOWN):
        return False
    return bool(function.__module__.startswith(_LINEAR))


class Arrivals:
    """Learns from one real backward which of some parameters it reaches, where the graph does not tell.

    `complete` once a backward was listened to. The hooks are on the parameters from `listen` to `close`.
    """

    def __init__(self, candidates: Iterable[torch.Tensor]) -> None:
        self.complete = self._open = False
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
        self.complete = self._open = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._open = False

    def _hook(
        self, ref: weakref.ref[torch.Tensor], heard: Callable[[torch.Tensor], None] | None
    ) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor | None) -> None:
            if gradient is None or not self._open:
                return
            self._arrived[id(ref())] = ref
            if heard is not None:
                heard(gradient)

        return hook
