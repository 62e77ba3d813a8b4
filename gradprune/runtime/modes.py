"""What torch and Python are doing right now. Tried with torch 2.11 and 2.13; private names that it takes live here."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext


class Settings:
    """What chooses kernels and types for a forward at this moment, on CPUs and CUDA devices: autocast, the default type
    and devices, the kinds of attention that are allowed."""

    def __init__(self) -> None:
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")
        ]
        self._caches = torch.is_autocast_cache_enabled()
        self._dtype = torch.get_default_dtype()
        self._devices = [mode.device for mode in function_modes() if isinstance(mode, DeviceContext)]
        self._attention = [read() for read, _ in _ATTENTION]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """They are as they were, inside."""
        now = Settings()
        torch.autocast_increment_nesting()
        self._put()
        try:
            with ExitStack() as devices:
                for device in self._devices:
                    devices.enter_context(device)
                yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            now._put()

    def _put(self) -> None:
        for kind, dtype, enabled in self._autocast:
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_cache_enabled(self._caches)
        torch.set_default_dtype(self._dtype)
        for (_, write), allowed in zip(_ATTENTION, self._attention):
            write(allowed)


_ATTENTION = [
    (getattr(torch.backends.cuda, f"{kind}_sdp_enabled"), getattr(torch.backends.cuda, f"enable_{kind}_sdp"))
    for kind in ("flash", "mem_efficient", "math", "cudnn")
]


def function_modes() -> list[TorchFunctionMode]:
    """Those on the stack of this thread, the topmost last."""
    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def can_be_lent(mode: TorchFunctionMode) -> bool:
    """Whether `Settings` has all that there is to a mode."""
    return isinstance(mode, DeviceContext)


def is_compiling() -> bool:
    """Whether torch.compile is at work in this thread."""
    return torch._guards.TracingContext.try_get() is not None  # type: ignore[no-untyped-call]


def mode_depth() -> tuple[int, int]:
    """Function modes and dispatch modes on the stacks of this thread: one may be left only while it is the topmost."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def inside_checkpoint() -> bool:
    """Whether a checkpoint (not the reentrant kind) takes what the graph would save."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def keeps_graph() -> bool:
    """Inside a backward: whether it was called with ``retain_graph=True``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def destination(node: Any) -> Literal["grad", "caller", "nowhere"]:
    """Inside a backward: where a gradient for the leaf of this AccumulateGrad node goes."""
    try:
        return "grad" if torch._C._will_engine_execute_node(node) else "nowhere"
    except RuntimeError:  # says so of a leaf that ``torch.autograd.grad`` was asked for
        return "caller"


def hooks_are_allowed() -> bool:
    """Whether ``saved_tensors_hooks`` may be entered here: not inside torch.func, for instance."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


@contextmanager
def without_collections() -> Iterator[None]:
    """Python looks for no reference cycles inside. A graph without activations is thousands of small objects, which
    would be taken for long-lived ones, and so bring on full collections: each as long as a forward, on every rank at
    another time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
