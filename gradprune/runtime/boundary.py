"""Where the model ends and the loss begins: the outermost calls of modules that own trainable parameters.

A step may call ``model(...)`` once, several times, or only its parts. A wrapper that reduces gradients is part of the
call, but runs as it is: only its *core*, the module that it wraps, is the model. Hooks are on the user's modules only
while one microbatch runs, and are taken off whatever happens.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from gradprune.patching import replaced
from gradprune.runtime.data_parallel import core_of
from gradprune.trace.modules import around_calls, is_compiled_in_place
from gradprune.trees import leaves, map_tensors

Enter = Callable[[], AbstractContextManager[Any]]
Forward = Callable[..., Any]
Compute = Callable[[str, "Call"], Any]
Leave = Callable[[str, torch.nn.Module, Any], Any]


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """As ``model.modules()``, in another order and, where it occurs twice, with repetition; several times as fast."""
    found: list[torch.nn.Module] = []
    todo: list[torch.nn.Module | None] = [model]
    while todo:
        module = todo.pop()
        if module is not None:
            found.append(module)
            todo += module._modules.values()
    return found


def trainable_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of `model` that own a parameter which requires grad, compiled ones not opened; outermost first."""
    found: list[torch.nn.Module] = []
    todo = [model]
    while todo:
        module = todo.pop(0)
        if module in found or not any(parameter.requires_grad for parameter in module.parameters()):
            continue
        found.append(module)
        # Hooks inside a compiled module are ignored, or make it compile again.
        if not hasattr(module, "_orig_mod") and not is_compiled_in_place(module):
            todo += module.children()
    return found


def _unchanged(name: str, module: torch.nn.Module, output: Any) -> Any:
    return output


@dataclass(frozen=True)
class Call:
    """``forward(*args, **kwargs)`` of a module; compiled: torch.compile made its forward."""

    module: torch.nn.Module
    forward: Forward
    args: Any
    kwargs: Any
    compiled: bool

    def __call__(self) -> Any:
        return self.forward(*self.args, **self.kwargs)


def _as_is(name: str, call: Call) -> Any:
    return call()


class _Hook:
    """A method of a Boundary as a hook: of this thread only, and nothing in a copy of its module."""

    def __init__(self, method: Callable[..., Any] | None) -> None:
        self._method, self._thread = method, threading.get_ident()

    def __call__(self, *args: Any) -> Any:
        if self._method is None or threading.get_ident() != self._thread:
            return None
        return self._method(*args)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook(None)


class _Computing:
    """What stands for the forward of a core while the hooks are on."""

    def __init__(self, boundary: Boundary, module: torch.nn.Module, attribute: str, compiled: bool) -> None:
        self._boundary, self._module, self._compiled = boundary, module, compiled
        self._forward: Forward = getattr(module, attribute)
        self._thread = threading.get_ident()
        functools.update_wrapper(self, self._forward)  # callers look at its signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        boundary = self._boundary
        if self._module is not boundary._core or threading.get_ident() != self._thread:
            return self._forward(*args, **kwargs)
        boundary._core = None
        call = Call(self._module, self._plain, args, kwargs, self._compiled)
        return boundary._compute(boundary._name, call)

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        self._boundary._depth += 1  # a recomputation may come while the hooks are on: it is no call of the user's
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._boundary._depth -= 1

    def __deepcopy__(self, memo: Any) -> Forward:
        copied = memo.get(id(self._module))
        return self._forward if copied is None else types.MethodType(type(copied).forward, copied)


class Boundary:
    """Turns the outermost calls among `modules` into events.

    around: context of such a call. compute: ``(name, call)`` runs the forward of its core.
    returned: called with the call's name (``"output"``, ``"output2"``), the module and what the whole call returned;
    what it gives is handed on instead. `entries` collects the modules that were outermost.
    """

    def __init__(
        self, modules: list[torch.nn.Module], *, around: Enter, compute: Compute = _as_is, returned: Leave = _unchanged
    ) -> None:
        self.entries: list[torch.nn.Module] = []
        self._modules, self._around, self._compute, self._returned = modules, around, compute, returned
        self._depth = self._calls = 0
        self._core: torch.nn.Module | None = None
        self._outer = ExitStack()

    def release(self) -> None:
        """Let go of whom it tells: they refer to each other."""
        self._around, self._compute, self._returned = nullcontext, _as_is, _unchanged

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """The hooks are on while this is open; re-open it to go on with the same microbatch."""
        cores = list(map(core_of, self._modules))
        with ExitStack() as hooks:
            for module in dict.fromkeys([*self._modules, *cores]):
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # it takes no hooks: its calls are not seen
                in_place = is_compiled_in_place(module)
                if self._compute is not _as_is and module in cores:
                    attribute = "_compiled_call_impl" if in_place else "forward"
                    computing = _Computing(self, module, attribute, in_place or hasattr(module, "_orig_mod"))
                    hooks.enter_context(replaced(module, attribute, computing))
                if in_place:
                    hooks.enter_context(around_calls(module, self._before, self._after))
                    continue
                handles = (
                    module.register_forward_pre_hook(_Hook(self._before)),
                    module.register_forward_hook(_Hook(self._after), always_call=True),
                )
                for handle in handles:
                    hooks.callback(handle.remove)
            try:
                yield
            finally:
                self._depth = 0
                self._outer.close()

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if self._depth == 0:
            if not any(module is entry for entry in self.entries):
                self.entries.append(module)
            self._core = core_of(module)
            self._calls += 1
            self._outer.enter_context(self._around())
        self._depth += 1

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        self._depth -= 1
        if self._depth == 0:
            self._outer.close()
            output = self._returned(self._name, module, output)
        return output

    @property
    def _name(self) -> str:
        return "output" if self._calls == 1 else f"output{self._calls}"


def float_leaves(name: str, output: Any) -> list[tuple[str, torch.Tensor]]:
    """The floating point tensors that a module returned, each once, named."""
    unique = {id(tensor): (leaf, tensor) for leaf, tensor in reversed(leaves(output, name))}
    return [(leaf, tensor) for leaf, tensor in reversed(unique.values()) if tensor.is_floating_point()]


def replace(output: Any, new: dict[int, torch.Tensor]) -> Any:
    """`output` with tensor t replaced by ``new[id(t)]`` where there is one."""
    return map_tensors(output, lambda tensor: new.get(id(tensor), tensor))
