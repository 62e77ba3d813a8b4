"""The Python values that a step can read: closures, globals, attributes, configuration. A cheap, incomplete watch.

It is there to notice a change *before* a dead microbatch runs. What it misses is caught afterwards, by
comparing the torch calls of the step with those of the proof.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from gradprune.frames import is_user_file

_SCALARS = (int, float, complex, bool, str, bytes, type(None))
_HASHABLE = (int, float, bool, str, bytes)
_DEPTH = 4
_ITEMS = 64
_ABSENT = object()


@dataclass
class PythonState:
    """Remembered values by readable name; `changed` names those that differ now."""

    _places: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = field(default_factory=dict)

    def changed(self) -> list[str]:
        return [name for name, (read, before) in self._places.items() if not _same(read(), before())]

    def forget(self, names: list[str]) -> None:
        for name in names:
            del self._places[name]

    def values(self) -> list[Any]:
        return [before() for _, before in self._places.values()]

    def __contains__(self, name: str) -> bool:
        return name in self._places


def capture(function: Callable[..., Any]) -> PythonState:
    """Everything of scalar kind that `function` and the user functions it names can reach, a few levels deep."""
    state = PythonState()
    seen: set[int] = set()
    for name, read in _function_places(function, seen, ""):
        _visit(name, read, state, seen, 0)
    return state


def scalars_of(function: type) -> tuple[tuple[str, Any], ...]:
    """The scalars that the methods of an autograd.Function can reach, by name."""
    state = PythonState()
    _visit_function_class(function.__qualname__, function, state, set(), 0)
    found = {name: before() for name, (_, before) in state._places.items()}
    return tuple(sorted((name, value) for name, value in found.items() if isinstance(value, _HASHABLE)))


def _same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    return type(now) is type(before) and isinstance(before, _SCALARS) and (now == before or now != now)


def _visit(name: str, read: Callable[[], Any], state: PythonState, seen: set[int], depth: int) -> None:
    value = read()
    if isinstance(value, ModuleType) or value is _ABSENT:
        return
    if isinstance(value, type):
        if issubclass(value, torch.autograd.Function) and id(value) not in seen:
            _visit_function_class(name, value, state, seen, depth)
        return
    state._places[name] = (read, _held(value))
    if isinstance(value, _SCALARS) or id(value) in seen or depth >= _DEPTH:
        return
    seen.add(id(value))
    for child, child_read in _children(value, seen):
        _visit(f"{name}{child}", child_read, state, seen, depth + 1)


def _held(value: Any) -> Callable[[], Any]:
    """A way to the value that keeps no tensor and no model alive."""
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return weakref.ref(value)
    return lambda: value


def _visit_function_class(name: str, kind: type, state: PythonState, seen: set[int], depth: int) -> None:
    """The numbers on an autograd.Function, and what its methods read."""
    seen.add(id(kind))
    for key, value in vars(kind).items():
        method = getattr(value, "__func__", value)
        if isinstance(value, _SCALARS) and not key.startswith("__"):
            _visit(f"{name}.{key}", functools.partial(getattr, kind, key, _ABSENT), state, seen, depth + 1)
        elif isinstance(method, FunctionType):
            for place, read in _function_places(method, seen, f"{name}.{key} "):
                _visit(place, read, state, seen, depth + 1)


def _children(value: Any, seen: set[int]) -> Iterator[tuple[str, Callable[[], Any]]]:
    if isinstance(value, FunctionType | MethodType | functools.partial):
        yield from _function_places(value, seen, " ")
    elif isinstance(value, torch.Tensor | torch.optim.Optimizer):
        return
    elif isinstance(value, Mapping):
        for key in list(value)[:_ITEMS]:
            yield f"[{key!r}]", functools.partial(_item, value, key)
    elif isinstance(value, list | tuple):
        for index in range(min(len(value), _ITEMS)):
            yield f"[{index}]", functools.partial(_item, value, index)
    elif hasattr(value, "__dict__"):
        for key in list(vars(value)):
            if not key.startswith("_") and not isinstance(vars(value)[key], torch.nn.Module):
                yield f".{key}", functools.partial(_item, vars(value), key)


def _item(container: Any, key: Any) -> Any:
    try:
        if isinstance(container, Mapping) and key not in container:  # a defaultdict would make it
            return _ABSENT
        return container[key]
    except (KeyError, IndexError):
        return _ABSENT


def _function_places(function: Any, seen: set[int], prefix: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    if isinstance(function, functools.partial):
        yield from _function_places(function.func, seen, prefix)
        yield f"{prefix}partial", functools.partial(_item, [[*function.args, function.keywords]], 0)
        return
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, ModuleType):
        yield f"{prefix}self", functools.partial(_item, [owner], 0)
    elif not isinstance(function, FunctionType) and callable(function) and hasattr(function, "__dict__"):
        yield f"{prefix}self", functools.partial(_item, [function], 0)
        function = type(function).__call__
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType) or not is_user_file(function.__code__.co_filename):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        yield f"{prefix}{name}", functools.partial(_cell, cell)
    for index in range(len(function.__defaults__ or ())):
        yield f"{prefix}default[{index}]", functools.partial(_item, function.__defaults__, index)
    names = _names(function.__code__)
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if not isinstance(value, ModuleType):
            yield f"{prefix}{name}", functools.partial(_item, function.__globals__, name)
        elif is_user_file(getattr(value, "__file__", None) or "<frozen"):
            for member in sorted(names & vars(value).keys()):
                yield f"{prefix}{name}.{member}", functools.partial(_item, vars(value), member)


def _names(code: CodeType) -> set[str]:
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*(_names(inner) for inner in nested))


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT
