"""What a run must notice of the user's code, since a dead microbatch that did without a backward would leave it out."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from gradprune.facts import SourceLine
from gradprune.frames import is_user_file, user_line
from gradprune.patching import replaced
from gradprune.runtime.boundary import modules_of
from gradprune.runtime.graphs import Reach
from gradprune.runtime.modes import is_compiling
from gradprune.schedule import Schedule


class TensorHooks:
    """Notices hooks that the user's code puts on tensors, inside the model too: they would not be called.

    Those by which a framework recomputes would be called for nothing: they are let go of instead.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._where: SourceLine | None = None
        self._forgetting: list[Callable[[], None]] = []

    @contextmanager
    def noticed(self) -> Iterator[None]:
        register: Any = torch.Tensor.register_hook

        @functools.wraps(register)
        def registered(tensor: torch.Tensor, hook: Any) -> Any:
            if (forget := self._schedule.recomputes(hook)) is not None:
                self._forgetting.append(forget)
            elif self._where is None and is_user_file(sys._getframe(1).f_code.co_filename):
                self._where = user_line()
            return register(tensor, hook)

        with replaced(torch.Tensor, "register_hook", registered):
            yield

    @property
    def recomputing(self) -> bool:
        """Whether a hook was noticed that computes again what the forward threw away."""
        return bool(self._forgetting)

    def forget(self) -> None:
        """Let go of what such hooks hold: they will not be called."""
        for forget in self._forgetting:
            forget()
        self._forgetting.clear()

    def objection(self) -> str | None:
        return None if self._where is None else f"a hook on a tensor sees its gradient, at {self._where}"


class InnerGradients:
    """Notices a forward that differentiates: its backward would ask for what is not kept, and torch.func allows nobody
    to keep nothing. met: it did."""

    def __init__(self) -> None:
        self.met = False

    @contextmanager
    def noticed(self) -> Iterator[None]:
        places: list[tuple[Any, str]] = [
            (torch.autograd, "_engine_run_backward"),
            (torch._C._autograd, "_saved_tensors_hooks_disable"),
        ]
        with ExitStack() as patches:
            for owner, name in places:
                patches.enter_context(replaced(owner, name, self._noting(getattr(owner, name))))
            yield

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            self.met = self.met or not is_compiling()  # which differentiates what it compiles
            return function(*args, **kwargs)

        return called


def unseen_functions(reach: Reach, applied: Container[Any]) -> str | None:
    """An objection to Functions of the loss whose call was not seen: their ``apply`` was bound to a name before."""
    for kind in reach.of_loss:
        function: Any = kind
        if function._forward_cls not in applied:
            return f"{function._forward_cls.__qualname__}.apply was called by a name that was bound to it before"
    return None


def sparse_gradient(entries: Iterable[torch.nn.Module]) -> str | None:
    """An objection to modules whose gradient is sparse: a zero would be of another layout."""
    for module in (module for entry in entries for module in modules_of(entry)):
        if getattr(module, "sparse", False) is True:
            return f"{type(module).__name__} with sparse=True has sparse gradients"
    return None
