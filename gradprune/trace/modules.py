"""Modules that ``module.compile()`` compiled in place: their hooks run inside the compiled code, ours must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    return module._compiled_call_impl is not None


@contextmanager
def around_calls(module: torch.nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[None]:
    """Calls ``before(module, args)``, and ``after(module, args, output)`` for the output, around the compiled call."""
    compiled: Any = module._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        before(module, args)
        output = None
        try:
            output = compiled(*args, **kwargs)
        finally:
            output = after(module, args, output)
        return output

    module._compiled_call_impl = call
    try:
        yield
    finally:
        module._compiled_call_impl = compiled
