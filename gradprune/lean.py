"""A forward that keeps its graph but no activations: what a backward would read is computed again if one comes.

A dead microbatch whose loss turns out to be another than the one that was proved must go on as a live one, without
running the user's code again. So its model runs as in `torch.utils.checkpoint`: the same kernels, the same graph, and
nothing saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from gradprune.boundary import Call, modules_of
from gradprune.modes import inside_checkpoint
from gradprune.random_state import RandomState
from gradprune.trees import leaves, map_tensors

Reopen = Callable[[], AbstractContextManager[Any]]


class Lean:
    """Runs forwards of one microbatch.

    buffers: what the model's forward writes to. model_buffers: all that a recomputation must leave as they are.
    devices: where random numbers are drawn.
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        model_buffers: Callable[[], Iterable[torch.Tensor]],
        devices: Iterable[torch.device],
    ) -> None:
        self._buffers, self._model_buffers, self._devices = buffers, model_buffers, tuple(devices)
        self.hides = False

    def run(self, call: Call, again: Reopen) -> Any:
        """What `call` gives. again: opens around a recomputation of it.

        A compiled module saves what it saves in one go, so that only a run under no_grad keeps nothing; its part of the
        graph is then one node, and `hides` is set.
        """
        if inside_checkpoint() or not torch.is_grad_enabled():
            return call()  # the user's own checkpoint keeps nothing either
        recomputing = self._recomputing(call.module, again)
        if call.compiled:
            self.hides = True
            return _hidden(call, recomputing)
        return checkpoint(
            call.forward,
            *call.args,
            use_reentrant=False,
            preserve_rng_state=False,
            determinism_check="none",  # of shapes; that each tensor is there is checked in any case
            context_fn=lambda: (nullcontext(), recomputing()),
            **call.kwargs,
        )

    def _recomputing(self, model: torch.nn.Module, again: Reopen) -> Reopen:
        """A context for the recomputation of a forward of `model` that begins now."""
        random, before = RandomState(self._devices), [buffer.clone() for buffer in self._buffers]
        training = [(module, module.training) for module in modules_of(model)]

        @contextmanager
        def context() -> Iterator[None]:
            buffers = [(buffer, buffer.clone()) for buffer in self._model_buffers()]
            modes = [(module, module.training) for module, _ in training]
            with ExitStack() as undo:
                undo.callback(_put, buffers)
                undo.callback(_set_training, modes)
                undo.enter_context(random.lent())
                undo.enter_context(again())
                _put(zip(self._buffers, before))
                _set_training(training)
                yield

        return context


def _set_training(modes: Iterable[tuple[torch.nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _put(values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, value in values:
        if not torch.equal(buffer, value):
            buffer.data.copy_(value)  # unseen by the version counter: graphs of other microbatches saved the buffer


def _hidden(call: Call, recomputing: Reopen) -> Any:
    """The forward as one node of the graph, which runs it again with a graph of its own in its backward."""
    shown: list[Any] = []

    def run(dummy: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(tensors)
        inputs = map_tensors((call.args, call.kwargs), lambda _: next(given))
        with recomputing() if torch.is_grad_enabled() else nullcontext():
            output = call.forward(*inputs[0], **inputs[1])
        shown[:] = [output]
        return tuple(dict.fromkeys(tensor for _, tensor in leaves(output)))

    tensors = [tensor for _, tensor in leaves((call.args, call.kwargs))]
    found = checkpoint(run, torch.zeros((), requires_grad=True), *tensors, use_reentrant=True, preserve_rng_state=False)
    (output,) = shown
    shown.clear()
    plain = dict.fromkeys(tensor for _, tensor in leaves(output))
    new = {id(tensor): linked for tensor, linked in zip(plain, found)}
    return map_tensors(output, lambda tensor: new[id(tensor)])
