"""The forward of a dead microbatch through one pipeline stage, so that it leaves what the live forward would leave.

Tried with megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_attr_wrapped_model

from gradprune.errors import PruneError
from gradprune.patching import replaced
from gradprune.schedule import Forward


class Stages:
    """The stages of `chunks` on this rank: what each received from the stage before, and its dead forward."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._owners = [_owner(chunk) for chunk in chunks]
        self._routers = [_routers(owner) for owner in self._owners]
        self._received: list[Sequence[torch.Tensor | None]] = [() for _ in chunks]

    @contextmanager
    def watch(self) -> Iterator[None]:
        """The wrappers are on the user's models while this is open."""
        with ExitStack() as stack:
            for index, owner in enumerate(self._owners):
                stack.enter_context(replaced(owner, "set_input_tensor", self._receiving(index, owner.set_input_tensor)))
            yield

    def computes_loss(self, model: torch.nn.Module) -> bool:
        return bool(self._owners[self._index(model)].post_process)

    def inputs(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """What the stage of `model` received, and the stage before waits for the gradient of."""
        received = self._received[self._index(model)]
        return [tensor for tensor in received if tensor is not None and tensor.requires_grad]

    def forward(self, model: torch.nn.Module) -> Forward:
        """See `gradprune.schedule.Schedule`."""
        index = self._index(model)
        owner, received = self._owners[index], list(self._received[index])
        deferred, states = len(_deferred_activations(owner)), get_cuda_rng_tracker().get_states()

        @contextmanager
        def again() -> Iterator[None]:
            tracker = get_cuda_rng_tracker()
            now, waiting = tracker.get_states(), list(self._received[index])
            tracker.set_states(states)
            try:
                with _receiving(owner, received, waiting):
                    yield
            finally:
                tracker.set_states(now)

        return Forward(_receiving(owner, received, received), again, lambda: _forget_activations(owner, deferred))

    @contextmanager
    def dead_forward(self, model: torch.nn.Module) -> Iterator[Sequence[torch.Tensor]]:
        """See `gradprune.schedule.Schedule`."""
        index = self._index(model)
        owner, received, waited_for = self._owners[index], self._received[index], self.inputs(model)
        with ExitStack() as stack:
            for router in self._routers[index]:
                stack.enter_context(replaced(router, "routing", _with_grad(router.routing)))
            stack.callback(_forget_activations, owner, len(_deferred_activations(owner)))
            if received:
                # Recomputation that distributes saved activations cuts its argument to pieces: let it be an alias.
                owner.set_input_tensor([None if tensor is None else tensor.detach() for tensor in received])
                stack.callback(owner.set_input_tensor, list(received))
            yield waited_for

    def _receiving(self, index: int, receive: Callable[[Any], None]) -> Callable[[Any], None]:
        def set_input_tensor(tensors: Any) -> None:
            self._received[index] = tensors if isinstance(tensors, list) else [tensors]
            receive(tensors)

        return set_input_tensor

    def _index(self, model: torch.nn.Module) -> int:
        owner = _owner(model)
        for index, known in enumerate(self._owners):
            if known is owner:
                return index
        raise PruneError(
            f"the {type(owner).__name__} that the step was called with is not one of the attached model chunks: pass "
            "gradprune.megatron.attach every chunk that is trained"
        )


@contextmanager
def _receiving(
    owner: Any, tensors: Sequence[torch.Tensor | None], after: Sequence[torch.Tensor | None]
) -> Iterator[None]:
    """`owner` reads `tensors` as a stage's input, or rather aliases of them: recomputation that distributes saved
    activations cuts its argument to pieces. Afterwards it holds `after`."""
    if tensors:
        owner.set_input_tensor([None if tensor is None else tensor.view_as(tensor) for tensor in tensors])
    try:
        yield
    finally:
        if tensors:
            owner.set_input_tensor(list(after))


def _owner(model: torch.nn.Module) -> Any:
    """The module inside the wrappers, DDP and mixed precision, that a schedule hands the stage's input to."""
    return get_attr_wrapped_model(model, "set_input_tensor", return_model_obj=True)


def _routers(owner: torch.nn.Module) -> list[Any]:
    return [module for module in owner.modules() if isinstance(module, TopKRouter)]


def _with_grad(routing: Callable[..., Any]) -> Callable[..., Any]:
    """Routers count tokens for their expert bias, and sort their top k, only while gradients are on."""

    def routed(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return routing(*args, **kwargs)

    return routed


def _deferred_activations(owner: Any) -> list[torch.Tensor]:
    """Activations that ``defer_embedding_wgrad_compute`` keeps for the weight gradient of the output layer."""
    return getattr(owner, "embedding_activation_buffer", None) or []


def _forget_activations(owner: Any, count: int) -> None:
    """Drop what a dead forward added: no backward will come for it."""
    del _deferred_activations(owner)[count:]
