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
        self._owners = [_holder(chunk, "set_input_tensor") for chunk in chunks]
        self._compute_loss = [bool(_holder(chunk, "post_process").post_process) for chunk in chunks]
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
        return self._compute_loss[self._index(model)]

    def inputs(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """What the stage of `model` received, and the stage before waits for the gradient of."""
        received = self._received[self._index(model)]
        return [tensor for tensor in received if tensor is not None and tensor.requires_grad]

    def forward(self, model: torch.nn.Module) -> Forward:
        """See `gradprune.schedule.Schedule`."""
        index = self._index(model)
        owner, received = self._owners[index], list(self._received[index])
        deferred, states = len(_deferred_activations(owner)), get_cuda_rng_tracker().get_states()
        counting = _Counting(self._routers[index])

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

        @contextmanager
        def first() -> Iterator[None]:
            with _receiving(owner, received, received), counting.forced():
                yield

        return Forward(first(), again, lambda: _forget_activations(owner, deferred), counting.undo)

    def kept_buffers(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """See `gradprune.schedule.Schedule`."""
        return [tokens for router in self._routers[self._index(model)] if (tokens := _tokens(router)) is not None]

    @contextmanager
    def dead_forward(self, model: torch.nn.Module) -> Iterator[Sequence[torch.Tensor]]:
        """See `gradprune.schedule.Schedule`."""
        index = self._index(model)
        owner, received, waited_for = self._owners[index], self._received[index], self.inputs(model)
        with ExitStack() as stack:
            stack.enter_context(_Counting(self._routers[index]).forced())
            stack.callback(_forget_activations, owner, len(_deferred_activations(owner)))
            stack.enter_context(_receiving(owner, received, received))
            yield waited_for

    def _receiving(self, index: int, receive: Callable[[Any], None]) -> Callable[[Any], None]:
        def set_input_tensor(tensors: Any) -> None:
            self._received[index] = tensors if isinstance(tensors, list) else [tensors]
            receive(tensors)

        return set_input_tensor

    def _index(self, model: torch.nn.Module) -> int:
        owner = _holder(model, "set_input_tensor")
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


def _holder(model: torch.nn.Module, name: str) -> Any:
    """The outermost module that has `name`, of the model and what its wrappers, DDP and mixed precision, hold."""
    try:
        return get_attr_wrapped_model(model, name, return_model_obj=True)
    except RuntimeError:
        raise PruneError(
            f"{type(model).__name__} holds no module with {name}, which every stage of Megatron's pipeline has: pass "
            "gradprune.megatron.attach the model that get_forward_backward_func() gets"
        ) from None


def _routers(owner: torch.nn.Module) -> list[Any]:
    return [module for module in owner.modules() if isinstance(module, TopKRouter)]


def _tokens(router: Any) -> torch.Tensor | None:
    """The buffer in which a router counts its tokens, if it does."""
    return getattr(router, "local_tokens_per_expert", None)


class _Counting:
    """Routers count tokens for their expert bias, and sort their top k, only while gradients are on: not in a forward
    under no_grad, nor in one that a checkpoint will run again in the backward, where they count."""

    def __init__(self, routers: Sequence[Any]) -> None:
        self._routers = routers
        self._before: dict[int, torch.Tensor] = {}

    @contextmanager
    def forced(self) -> Iterator[None]:
        """Routers count in any case."""
        with ExitStack() as stack:
            for router in self._routers:
                stack.enter_context(replaced(router, "routing", self._with_grad(router, router.routing)))
            yield

    def undo(self) -> None:
        """Take back what would not have been counted."""
        for router in self._routers:
            if id(router) in self._before:
                tokens = _tokens(router)
                assert tokens is not None
                tokens.data.copy_(self._before[id(router)])

    def _with_grad(self, router: Any, routing: Callable[..., Any]) -> Callable[..., Any]:
        def routed(*args: Any, **kwargs: Any) -> Any:
            tokens = _tokens(router)
            if not torch.is_grad_enabled() and tokens is not None:
                self._before.setdefault(id(router), tokens.clone())
            with torch.enable_grad():
                return routing(*args, **kwargs)

        return routed


def _deferred_activations(owner: torch.nn.Module) -> list[torch.Tensor]:
    """Activations that ``defer_embedding_wgrad_compute`` keeps for the weight gradient of the output layer."""
    try:
        return get_attr_wrapped_model(owner, "embedding_activation_buffer") or []
    except RuntimeError:
        return []


def _forget_activations(owner: torch.nn.Module, count: int) -> None:
    """Drop what a dead forward added: no backward will come for it."""
    del _deferred_activations(owner)[count:]
