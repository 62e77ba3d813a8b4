"""The dead path: a loss that can be backpropagated and reaches nothing of the model, and zeros where zeros would be.

    parameters (those that must see a zero) -> _Anchor -> _Ending -> a loss of the same value, for the user

The user's backward comes to the ending first, which runs the loss's own backward up to where the model ends and notes
how large the cotangent is there; then to the anchor, which reports that, and hands zeros to the parameters whose
gradient is still None or whose hooks must fire. A pipeline stage that computes no loss has a `_Boundary` at each of its
outputs instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from gradprune.runtime.guard import magnitude, poison_of
from gradprune.runtime.modes import destination, keeps_graph


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Where the gradient of a parameter lives: Megatron's ``main_grad`` if there is one, else ``grad``."""
    main = getattr(parameter, "main_grad", None)
    return main if main is not None else parameter.grad


def needs_zero(parameter: torch.Tensor) -> bool:
    """Whether an unpruned zero gradient would leave a trace that doing nothing would not: a grad, or a hook's call."""
    if getattr(parameter, "main_grad", None) is not None:
        return False
    if parameter.grad is None:
        return True
    hooks: Any = parameter
    return bool(hooks._backward_hooks or getattr(hooks, "_post_accumulate_grad_hooks", None))


class Delivery:
    """The backward end of one dead microbatch.

    parameters: what the unpruned backward would reach. report: called once per backward with the magnitude of the
        cotangent at the model's boundary (0-dim tensor, zero if all is well). to_all: deliver a zero to every
        parameter, not only to those where it would be missed.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], report: Callable[[torch.Tensor], None], *, to_all: bool = False
    ) -> None:
        self._parameters = list(parameters)
        self._report, self._to_all = report, to_all
        self._others: list[torch.Tensor] = []
        self._magnitudes: list[torch.Tensor] = []
        self._standing: list[torch.Tensor] = []
        self._failures: list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = []
        self._anchor: torch.Tensor | None = None

    def also(self, tensors: Iterable[torch.Tensor]) -> None:
        """Deliver zeros to these tensors too: leaves that require grad. Before the first output is bound."""
        self._others += tensors

    @property
    def anchor(self) -> torch.Tensor:
        """A scalar zero whose backward ends this microbatch."""
        if self._anchor is None:
            with torch.enable_grad():
                dummy = torch.zeros((), requires_grad=True)
                self._anchor = _Anchor.apply(self, dummy, *self._connected(), *self._others)
        return self._anchor

    def bound(self, output: torch.Tensor) -> torch.Tensor:
        """`output` (floating point, no graph) as a non-leaf whose gradient is looked at and goes no further."""
        with torch.enable_grad():
            return _Boundary.apply(output.detach(), self.anchor, self)

    def ending(self, loss: torch.Tensor, entrances: Sequence[GradientEdge] = (), once: bool = False) -> torch.Tensor:
        """The value of `loss`, cut off from its graph. Its backward runs that of `loss` as far as `entrances`, where it
        looks at the cotangent; without them `loss` is let go. once: the backward of `loss` can run but once."""
        whole = (loss, entrances, once) if entrances else None
        with torch.enable_grad():
            return _Ending.apply(loss.detach().clone(), self.anchor, self, whole)

    def see(self, size: torch.Tensor) -> None:
        """Take note of a magnitude that should be zero, of this backward."""
        self._magnitudes.append(size)

    def stands(self, size: torch.Tensor) -> None:
        """Take note of a magnitude that should be zero, of every backward."""
        self._standing.append(size)

    def failed(self, failure: torch.Tensor, report: Callable[[torch.Tensor], None]) -> None:
        """Take note of something that should be zero, and else makes every backward not finite: `report` is called
        with it once there is one."""
        self._standing.append(poison_of(failure))
        self._failures.append((failure, report))

    def _connected(self) -> list[torch.Tensor]:
        """The parameters that are told of this microbatch. Megatron's are not, unless all are: hooks on where their
        gradients accumulate would take even none for a gradient."""
        return [p for p in self._parameters if self._to_all or getattr(p, "main_grad", None) is None]

    def zeros(self, edges: Sequence[Any]) -> list[torch.Tensor | None]:
        """What goes along `edges`, to the parameters and the other tensors: a zero where one would be missed."""
        connected = self._connected()
        tensors, first = [*connected, *self._others], 0 if self._to_all else len(connected)
        sent: list[torch.Tensor | None] = []
        for index, (tensor, (node, _)) in enumerate(zip(tensors, edges)):
            goal = destination(node)
            wanted = goal == "caller" or (goal == "grad" and (index >= first or needs_zero(tensor)))
            sent.append(_zero(tensor) if wanted else None)
        return sent

    def close(self) -> torch.Tensor | None:
        """Report what was seen; the largest of it, or None if nothing was."""
        seen, self._magnitudes = [*self._magnitudes, *self._standing], []
        failures, self._failures = self._failures, []
        for failure, report in failures:
            report(failure)
        if not seen:
            return None
        size = largest(seen)
        self._report(size)
        _poison(self._parameters, size)
        return size


def largest(magnitudes: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest of some magnitudes (at least one); NaN if any is."""
    # amax, unlike max of a Python list, keeps a NaN.
    return torch.stack(list(magnitudes)).amax() if len(magnitudes) > 1 else magnitudes[0]


def _poison(parameters: Sequence[torch.Tensor], size: torch.Tensor) -> None:
    """Add zero, or NaN if `size` is not zero, to one existing gradient: enough for any check for overflow, no sync."""
    held = [part for p in parameters if (g := gradient_of(p)) is not None and (part := _local(g)).numel()]
    if held:
        _add_poison(held, size)


def _add_poison(tensors: Sequence[torch.Tensor], size: torch.Tensor) -> None:
    """To the smallest of `tensors`, on the device of `size` if there is one: another would have to wait for it."""
    near = [tensor for tensor in tensors if tensor.device == size.device] or tensors
    smallest = min(near, key=torch.Tensor.numel)
    smallest.add_(poison_of(size).to(smallest.device, smallest.dtype))


def _local(tensor: Any) -> torch.Tensor:
    """The part of a sharded tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class _Ending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor, delivery: Delivery, whole: Any) -> torch.Tensor:
        ctx.mark_dirty(value)
        ctx.delivery, ctx.device, ctx.whole = delivery, anchor.device, whole
        return value

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[Any, ...]:
        if ctx.whole is not None:
            loss, entrances, once = ctx.whole
            # Retained: what else the user returned from the step may share the graph.
            kept = not once or keeps_graph()
            found = torch.autograd.grad(loss, entrances, cotangent, retain_graph=kept, allow_unused=True)
            for gradient in found:
                if gradient is not None:
                    ctx.delivery.see(magnitude(gradient))
            if not keeps_graph():
                ctx.whole = None
        return None, torch.zeros((), device=ctx.device), None, None


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, anchor: torch.Tensor, delivery: Delivery) -> torch.Tensor:
        # mark_dirty makes `output` itself the result: no copy of the logits, and not a view, so that the user may
        # go on to change it in place.
        ctx.mark_dirty(output)
        ctx.delivery, ctx.device = delivery, anchor.device
        return output

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[Any, ...]:
        ctx.delivery.see(magnitude(cotangent))
        return None, torch.zeros((), device=ctx.device), None


class _Shield(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        return cotangent


def shield(output: torch.Tensor) -> torch.Tensor:
    """`output`, or an alias of it, with one more node of its graph in front, which does nothing."""
    return output.view_as(output) if output._is_view() else _Shield.apply(output)


def _zero(tensor: torch.Tensor) -> torch.Tensor:
    """A gradient of zero; where the caller will differentiate it, one with a graph."""
    return tensor * 0.0 if torch.is_grad_enabled() else torch.zeros_like(tensor)


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, delivery: Delivery, dummy: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.delivery = delivery
        return dummy.detach().clone()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[Any, ...]:
        size = ctx.delivery.close()
        zeros = ctx.delivery.zeros(ctx.next_functions[1:])
        parts = [part for zero in zeros if zero is not None and (part := _local(zero)).numel()]
        if size is not None and parts:
            _add_poison(parts, size)
        return (None, None, *zeros)
