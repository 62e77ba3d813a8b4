"""The torch calls of a running program as data, and the comparison of a run with a recorded one.

A program that makes the same torch calls with the same operands, in the same order, computes the same thing, whatever
Python state led to it. `CallRecorder` writes the calls down; `CallWatch` compares a run with recorded streams.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from gradprune.facts import SourceLine
from gradprune.joint import Call

_FOREIGN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep

# Reads of data by Python: their results are unknown to a trace and must be the same on a run of the same path.
READS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "equal")
) | frozenset((torch.equal, torch.allclose, torch.Tensor.allclose, torch.is_nonzero, torch.Tensor.is_nonzero))


@cache
def is_user_file(file: str) -> bool:
    """Whether `file` holds the user's code: not torch's, not the standard library's and not this package's."""
    if file.startswith("<frozen") or file.startswith(_FOREIGN):
        return False
    return not file.startswith(_STDLIB) or "site-packages" in file


@cache
def _source_line(file: str, line: int, function: str) -> SourceLine:
    return SourceLine(file, line, linecache.getline(file, line).strip(), function)


def user_line(frame: types.FrameType | None) -> SourceLine | None:
    """The innermost line of user code at or above `frame`; None where there is none."""
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return _source_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def error_line(error: BaseException) -> SourceLine | None:
    """The innermost line of user code that `error` passed through."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_user_file(code.co_filename):
            found = _source_line(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return found


_names: dict[Any, str] = {}


def function_name(func: Any) -> str:
    """The public name of a torch function or method: ``torch.exp``, ``torch.Tensor.add_``."""
    name = _names.get(func)
    if name is None:
        name = _names[func] = resolve_name(func) or f"{func.__module__}.{func.__qualname__}"
    return name


class Numbers:
    """Numbers tensors by first appearance, without keeping any alive."""

    def __init__(self, leaves: Mapping[str, torch.Tensor]) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._next = 0
        for tensor in leaves.values():
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> int:
        """Numbers a tensor that has not appeared."""
        self._known[id(tensor)] = (weakref.ref(tensor), self._next)
        self._next += 1
        return self._next - 1

    def of(self, tensor: torch.Tensor) -> int:
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else self.add(tensor)


class CallRecorder(TorchFunctionMode):
    """Records the torch calls made while it is entered, as `joint.Call` in ``calls``.

    leaves: the tensors that the program is given, numbered 0, 1, ... in this order; every other tensor is numbered
        when it first appears, as an operand or a result.
    lines: also record the user's line of each call (walks frames: for traces, not for runs).

    Recorded are the calls that give tensors, change them, or read their data; not those that ask for sizes, dtypes
    and the like.
    """

    def __init__(self, leaves: Mapping[str, torch.Tensor], *, lines: bool = False) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.numbers = Numbers(leaves)
        self._lines = lines
        self._paused = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        operands = self.operands(args, kwargs)
        where = user_line(sys._getframe(1)) if self._lines else None
        result = func(*args, **kwargs)
        if is_computation(func, result):
            self.calls.append(Call(function_name(func), operands, where))
            self.number_results(result)
        return result

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Calls made inside are not recorded; a tensor that comes out is numbered where it is first used."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def operands(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
        """What a call is given, flattened as `joint.Call` says; sequences and keywords leave a marker of their own."""
        flat: list[tuple[Any, ...]] = [("value", torch.is_grad_enabled()), ("value", autocast_state())]
        for arg in args:
            self._flatten(arg, flat)
        for key in sorted(kwargs):
            flat.append(("value", f"{key}="))
            self._flatten(kwargs[key], flat)
        return tuple(flat)

    def _flatten(self, value: Any, flat: list[tuple[Any, ...]]) -> None:
        if isinstance(value, torch.Tensor):
            flat.append(("tensor", self.numbers.of(value)))
        elif isinstance(value, (list, tuple)):
            flat.append(("value", (type(value).__name__, len(value))))
            for item in value:
                self._flatten(item, flat)
        elif isinstance(value, dict):
            flat.append(("value", ("dict", *value)))
            for item in value.values():
                self._flatten(item, flat)
        else:
            flat.append(self.operand(value))

    def operand(self, value: Any) -> tuple[Any, ...]:
        """One operand that is neither a tensor nor a container."""
        return ("value", value)

    def number_results(self, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self.numbers.of(result)
        elif isinstance(result, (list, tuple)):
            for item in result:
                self.number_results(item)


def is_computation(func: Any, result: Any) -> bool:
    """Whether a call is part of what a program computes: it gives a tensor, changes one, or reads data."""
    if isinstance(result, torch.Tensor) or func in READS:
        return True
    if isinstance(result, (list, tuple)):
        return any(is_computation(None, item) for item in result)
    return result is None and getattr(func, "__name__", "") not in ("__get__", "retain_grad")


def autocast_state() -> tuple[Any, ...]:
    """The autocast settings in force, per device type that has it switched on."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return ()
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )
