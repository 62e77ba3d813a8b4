"""The torch calls of a running program as data.

A program that makes the same torch calls with the same operands, in the same order, computes the same thing, whatever
Python state led to it. `CallRecorder` writes the calls down; `tests/call_watch.py` compares a run with them.

Calls that ask (for a size, a dtype, a value) are not written down: what they answer shows in the operands of later
calls, and in which calls are made.
"""

from __future__ import annotations

import contextlib
import re
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from gradprune.frames import user_line
from gradprune.joint import Call

#: Calls that give Python the data of tensors: of one, or how two compare.
READS = frozenset(getattr(torch.Tensor, name) for name in ("item", "tolist", "__bool__", "__int__", "__float__"))
COMPARISONS = frozenset((torch.equal, torch.Tensor.equal, torch.allclose, torch.Tensor.allclose))

# Calls that return nothing, or nothing of torch's, and still are part of the program.
_EFFECTS = frozenset("register_hook register_post_accumulate_grad_hook".split())
# Calls that return nothing and are seen otherwise: modes are operands of each call.
_SILENT = frozenset("_set_grad_enabled _enter_autocast _exit_autocast retain_grad __get__".split())


def is_computation(func: Any, result: Any) -> bool:
    """Whether a call is part of what a program computes: it gives a tensor or changes one."""
    if isinstance(result, torch.Tensor):
        return True
    if isinstance(result, (list, tuple)):
        return any(is_computation(None, item) for item in result)
    name = getattr(func, "__name__", "")
    return name in _EFFECTS or (result is None and func is not None and name not in _SILENT)


_function_names: dict[Any, str] = {}


def function_name(func: Any) -> str:
    """The public name of a torch function or method: ``torch.exp``, ``torch.Tensor.add_``."""
    name = _function_names.get(func)
    if name is None:
        owner = getattr(func, "__self__", None)
        name = resolve_name(func) or f"{getattr(func, '__module__', '')}.{getattr(func, '__qualname__', func)}"
        owner_name = getattr(owner, "__name__", None)
        name = _function_names[func] = f"{name} of {owner_name}" if owner_name else name
    return name


def autocast_state() -> tuple[Any, ...]:
    """The autocast settings in force: device type and dtype of each that is on."""
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )


class Numbers:
    """Numbers tensors by first appearance, without keeping any of them alive."""

    def __init__(self, leaves: int = 0) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], tuple[int, ...]]] = {}
        self._next = leaves

    def bind(self, tensor: torch.Tensor, number: int) -> None:
        """Declares a leaf; a tensor may be several of them."""
        known = self._known.get(id(tensor))
        before = known[1] if known is not None and known[0]() is tensor else ()
        self._known[id(tensor)] = (weakref.ref(tensor), (*before, number))

    def of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The numbers of a tensor: one, unless it was declared under several names."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        self._next += 1
        self._known[id(tensor)] = (weakref.ref(tensor), (self._next - 1,))
        return (self._next - 1,)

    def is_new(self, tensor: torch.Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is None or known[0]() is not tensor

    def number_results(self, result: Any) -> None:
        for tensor in tensors_in(result):
            self.of(tensor)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: tuple[Any, ...] = ()) -> list[Any]:
    """What a call is given, in the order of `joint.Call.operands`; containers and keywords leave a marker."""
    flat = list(mode)
    for arg in args:
        _flatten(arg, flat)
    for key in sorted(kwargs):
        flat.append(f"{key}=")
        _flatten(kwargs[key], flat)
    return flat


def _flatten(value: Any, flat: list[Any]) -> None:
    if isinstance(value, torch.Tensor):
        flat.append(value)
    elif isinstance(value, (list, tuple)):
        flat.append((list if isinstance(value, list) else tuple, len(value)))
        for item in value:
            _flatten(item, flat)
    elif isinstance(value, dict):
        flat.append((dict, *value))
        for item in value.values():
            _flatten(item, flat)
    elif isinstance(value, slice):
        flat += (slice, value.start, value.stop, value.step)
    else:
        flat.append(value)


_line: list[Any] = []


@contextlib.contextmanager
def at_line(where: Any) -> Iterator[None]:
    """Calls made inside were written by the user at `where`, whoever makes them now."""
    _line.append(where)
    try:
        yield
    finally:
        _line.pop()


def current_line() -> Any:
    """The user's line that makes the current call."""
    return _line[-1] if _line else user_line(sys._getframe(1))


def read_key(numbers: Numbers, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Names what a read gives: the values of a tensor, or how two tensors compare."""
    kind = func.__name__ if func in COMPARISONS else "values"
    return (kind, *(numbers.of(tensor)[0] for tensor in tensors_in(args)))


class PausableMode(TorchFunctionMode):
    """A function mode that can look away, and be entered again after it was left."""

    def __init__(self) -> None:
        super().__init__()
        self._pauses = 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Calls made inside are not seen; a tensor that comes out is numbered where it is first used."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1


class CallRecorder(PausableMode):
    """Records the torch calls made while it is entered, as `joint.Call`, in ``calls``.

    leaves: the tensors that the program is given, numbered 0, 1, ... in this order; every other tensor is numbered
        when it first appears, as an operand or a result.
    lines: also record the user's line of each call (walks frames: for traces, not for runs).
    """

    def __init__(self, leaves: Mapping[str, torch.Tensor], *, lines: bool = False) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._lines = lines
        self.bind(leaves)

    def bind(self, leaves: Mapping[str, torch.Tensor]) -> None:
        """Starts the numbering with `leaves`."""
        self.numbers = Numbers(len(leaves))
        for number, tensor in enumerate(leaves.values()):
            self.numbers.bind(tensor, number)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._pauses:
            return func(*args, **kwargs)
        operands = self.operands(args, kwargs)
        where = current_line() if self._lines else None
        result = func(*args, **kwargs)
        self.record(func, operands, where, result)
        return result

    def record(self, func: Any, operands: tuple[tuple[Any, ...], ...], where: Any, result: Any) -> None:
        """Writes a call down that was made, if it is part of the computation."""
        if is_computation(func, result):
            self.calls.append(Call(function_name(func), operands, where))
            self.numbers.number_results(result)

    def operands(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
        mode = (torch.is_grad_enabled(), autocast_state())
        return tuple(self.operand(value) for value in flatten(args, kwargs, mode))

    def operand(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, torch.Tensor):
            return ("tensor", self.numbers.of(value)[0])
        return ("value", value)


def mutates(name: str, kwargs: Any) -> bool:
    """Whether a torch function of this name writes to what it is given."""
    if "out" in kwargs or name in ("__setitem__", "__set__") or re.fullmatch(r"__i[a-z]+__", name):
        return name not in ("__index__", "__int__", "__invert__")
    return name.endswith("_") and not name.endswith("__")
