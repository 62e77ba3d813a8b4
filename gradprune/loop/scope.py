"""What the body of a loop can reach at run time: its models, the Python values it may branch on, its tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from gradprune.frames import is_user_file
from gradprune.trees import leaves

_SCALARS = (int, float, complex, bool, str, bytes, type(None))
_CLOSED = (*_SCALARS, torch.Tensor, torch.optim.Optimizer, torch.device, torch.dtype, type, ModuleType)
_DEPTH = 4
_ITEMS = 64
_OBJECTS = 512


def find_models(values: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    """The outermost modules with trainable parameters that are among `values` or in reach of them, by dotted name.

    Opened are containers, the attributes of objects, and the closures and globals of functions, a few levels deep.
    """
    found: dict[str, torch.nn.Module] = {}
    seen: set[int] = set()
    todo = [(name, value, 0) for name, value in values.items()]
    while todo and len(seen) < _OBJECTS:
        name, value, depth = todo.pop(0)
        if id(value) in seen or isinstance(value, _CLOSED):
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            if any(parameter.requires_grad for parameter in value.parameters()):
                found[name] = value
        elif depth < _DEPTH:
            todo += [(_child(name, key), item, depth + 1) for key, item in _parts(value)]
    return found


def scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, strings, flags and None among `values` or in reach of them, by dotted name; modules are not opened."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    todo = [(name, value, 0) for name, value in values.items()]
    while todo and len(seen) < _OBJECTS:
        name, value, depth = todo.pop(0)
        if isinstance(value, _SCALARS):
            found[name] = value
        elif id(value) not in seen and not isinstance(value, (*_CLOSED, torch.nn.Module, FunctionType, MethodType)):
            seen.add(id(value))
            if depth < _DEPTH:
                todo += [(_child(name, key), item, depth + 1) for key, item in _parts(value)]
    return found


def tensors(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors among `values` and inside batches among them, by name; modules and functions are not opened."""
    return {
        leaf: tensor
        for name, value in values.items()
        if not isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) and not callable(value)
        for leaf, tensor in leaves(value, name)
    }


def _child(name: str, key: Any) -> str:
    return f"{name}[{key}]" if isinstance(key, int) else f"{name}.{key}"


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, functools.partial):
        yield from (("func", value.func), *enumerate(value.args), *value.keywords.items())
    elif isinstance(value, MethodType):
        yield from (("self", value.__self__), ("func", value.__func__))
    elif isinstance(value, FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, Mapping):
        yield from list(value.items())[:_ITEMS]
    elif isinstance(value, list | tuple):
        yield from enumerate(value[:_ITEMS])
    elif hasattr(value, "__dict__"):
        yield from list(vars(value).items())[:_ITEMS]


def _function_parts(function: FunctionType) -> Iterator[tuple[str, Any]]:
    if hasattr(function, "__wrapped__"):
        yield "wrapped", function.__wrapped__
    if not is_user_file(function.__code__.co_filename):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        if (held := cell_value(cell)) is not None:
            yield name, held
    for name in sorted(_global_names(function.__code__) & function.__globals__.keys()):
        yield name, function.__globals__[name]


def cell_value(cell: Any) -> Any:
    """What a closure cell holds; None while it holds nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@functools.lru_cache(maxsize=1024)
def _global_names(code: CodeType) -> frozenset[str]:
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*(_global_names(inner) for inner in nested))
