"""A forward that keeps its graph but no activations: what a backward would read is computed again if one comes.

A dead microbatch whose loss turns out to be another than the one that was proved must go on as a live one, without
running the user's code again. So its model runs as in a checkpoint: the same kernels and graph, and nothing saved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from gradprune.runtime.boundary import Call, float_leaves, replace
from gradprune.runtime.model_state import Arguments, ModelState
from gradprune.runtime.modes import can_be_lent, function_modes, hooks_are_allowed, inside_checkpoint
from gradprune.runtime.random_state import RandomState
from gradprune.runtime.unsaved import Unsaved
from gradprune.trees import leaves, map_tensors

Reopen = Callable[[], AbstractContextManager[Any]]


class Lean:
    """Runs forwards of one microbatch.

    buffers: what the model's forward writes to. model_buffers: all that a recomputation must leave as they are.
    devices: where random numbers are drawn. stateful: the forward changes something of the model's own, or of what it
    is given, so that it cannot be computed again: what it saves is kept until its loss is there. linked: see `_hidden`.
    hides: the graph of what was run does not show what it reaches. leaves: what was put into the graph and is nobody's.
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        model_buffers: Callable[[], Iterable[torch.Tensor]],
        devices: Iterable[torch.device],
        stateful: bool,
        linked: Collection[str],
    ) -> None:
        self._buffers, self._model_buffers, self._devices = buffers, model_buffers, tuple(devices)
        self._stateful, self._linked = stateful, linked
        self.hides = False
        self.leaves: list[torch.Tensor] = []

    def run(self, name: str, call: Call, again: Reopen) -> Any:
        """What `call` gives. again: opens around a recomputation of it.

        A compiled module saves what it saves in one go, so that only a run under no_grad keeps nothing; its part of the
        graph is then one node.
        """
        if self._stateful or inside_checkpoint() or not torch.is_grad_enabled() or not hooks_are_allowed():
            return call()  # the user's own checkpoint keeps nothing either
        if not all(map(can_be_lent, function_modes())):
            return call()  # what the user's modes do is not known
        tensors = dict.fromkeys(tensor for _, tensor in leaves((call.args, call.kwargs)))
        given, recomputing = Arguments(tensors), _Recomputing(self, call.module, again)
        if call.compiled:
            self.hides = True
            self.leaves.append(torch.zeros((), requires_grad=True))
            return _hidden(name, call, given, recomputing, self._linked, self.leaves[-1])

        def forward() -> Any:
            args, kwargs = map_tensors((call.args, call.kwargs), given.as_given)
            return call.forward(*args, **kwargs)

        return Unsaved(forward, recomputing).run()


class _Recomputing:
    """A context for recomputations of a forward of `model` that begins now; opened once for each."""

    def __init__(self, lean: Lean, model: torch.nn.Module, again: Reopen) -> None:
        self._lean, self._again = lean, again
        self._random, self._state = RandomState(lean._devices), ModelState(model)
        self._before = [buffer.clone() for buffer in lean._buffers]
        self._undo: list[ExitStack] = []

    def __enter__(self) -> None:
        buffers = [(buffer, buffer.clone()) for buffer in self._lean._model_buffers()]
        with ExitStack() as undo:
            undo.callback(_put, buffers)
            undo.enter_context(self._random.lent())
            undo.enter_context(self._state.lent())
            undo.enter_context(self._again())
            _put(zip(self._lean._buffers, self._before))
            self._undo.append(undo.pop_all())

    def __exit__(self, *exception: Any) -> None:
        self._undo.pop().__exit__(*exception)


def _put(values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, value in values:
        if not torch.equal(buffer, value):
            buffer.data.copy_(value)  # unseen by the version counter: graphs of other microbatches saved the buffer


def _hidden(
    name: str, call: Call, given: Arguments, recomputing: _Recomputing, linked: Collection[str], dummy: torch.Tensor
) -> Any:
    """The forward as one node of the graph, which runs it again with a graph of its own in its backward. linked: names
    of the outputs that come from that node. dummy: a leaf for there to be a graph."""
    shown: list[Any] = []

    def run(dummy: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        taken = iter(tensors)
        with recomputing if torch.is_grad_enabled() else nullcontext():
            args, kwargs = map_tensors((call.args, call.kwargs), lambda _: given.as_given(next(taken)))
            output = call.forward(*args, **kwargs)
        shown[:] = [output]
        return tuple(_linked(name, output, linked))

    tensors = [tensor for _, tensor in leaves((call.args, call.kwargs))]
    found = checkpoint(run, dummy, *tensors, use_reentrant=True, preserve_rng_state=False)
    (output,) = shown
    shown.clear()
    new = {id(tensor): from_node for tensor, from_node in zip(_linked(name, output, linked), found)}
    return replace(output, new)


def _linked(name: str, output: Any, linked: Collection[str]) -> list[torch.Tensor]:
    return [tensor for leaf, tensor in float_leaves(name, output) if leaf in linked]
