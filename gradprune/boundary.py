"""Where the model ends and the loss begins: the outermost calls of modules that own trainable parameters.

A step may call ``model(...)`` once, several times, or only its parts. Hooks are on the user's modules only while one
microbatch runs, and are taken off whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from gradprune.trees import leaves, map_tensors

Enter = Callable[[], AbstractContextManager[Any]]
Leave = Callable[[str, Any], Any]


def trainable_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of `model` that own a parameter which requires grad, compiled ones not opened; outermost first."""
    found: list[torch.nn.Module] = []
    todo = [model]
    while todo:
        module = todo.pop(0)
        if module in found or not any(parameter.requires_grad for parameter in module.parameters()):
            continue
        found.append(module)
        if not hasattr(module, "_orig_mod"):  # hooks inside a compiled module are ignored, or make it compile again
            todo += module.children()
    return found


class Boundary:
    """Turns the outermost calls among `modules` into events.

    inside: context for the time that a module runs. leave: called with the call's name (``"output"``, ``"output2"``)
    and what the module returned; what it returns is handed to the user's code instead.
    `entries` collects the modules that were outermost.
    """

    def __init__(self, modules: list[torch.nn.Module], inside: Enter, leave: Leave) -> None:
        self.entries: list[torch.nn.Module] = []
        self._modules, self._inside, self._leave = modules, inside, leave
        self._depth = self._calls = 0
        self._stack = ExitStack()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """The hooks are on while this is open; re-open it to go on with the same microbatch."""
        with ExitStack() as hooks:
            for module in self._modules:
                handles = (
                    module.register_forward_pre_hook(self._before),
                    module.register_forward_hook(self._after, always_call=True),
                )
                for handle in handles:
                    hooks.callback(handle.remove)
            try:
                yield
            finally:
                self._depth = 0
                self._stack.close()

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if self._depth == 0:
            if not any(module is entry for entry in self.entries):
                self.entries.append(module)
            self._stack.enter_context(self._inside())
        self._depth += 1

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        self._depth -= 1
        if self._depth:
            return None
        self._stack.close()
        self._calls += 1
        return self._leave("output" if self._calls == 1 else f"output{self._calls}", output)


def float_leaves(name: str, output: Any) -> list[tuple[str, torch.Tensor]]:
    """The floating point tensors that a module returned, each once, named."""
    unique = {id(tensor): (leaf, tensor) for leaf, tensor in reversed(leaves(output, name))}
    return [(leaf, tensor) for leaf, tensor in reversed(unique.values()) if tensor.is_floating_point()]


def replace(output: Any, new: dict[int, torch.Tensor]) -> Any:
    """`output` with tensor t replaced by ``new[id(t)]`` where there is one."""
    return map_tensors(output, lambda tensor: new.get(id(tensor), tensor))
