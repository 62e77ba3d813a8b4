"""The tensors inside what users pass as a batch or return from a step: find, replace and look up by dotted name.

A *tree* is any nest of mappings, sequences, dataclasses, objects with a ``__dict__`` and types registered with
``torch.utils._pytree``; a *leaf* is a tensor in it. Names read as the user writes them: ``batch.meta.mask``,
``outputs[0]``; a mapping's key and an object's attribute look alike.
"""

from __future__ import annotations

import copy
import enum
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gradprune.errors import PruneError

Leaf = tuple[str, torch.Tensor]
Rebuild = Callable[[list[Any]], Any]

# Never opened: what they hold is not part of a batch, and walking them is slow or has no end.
_OPAQUE = (
    *(str, bytes, bytearray, bool, int, float, complex, type(None), range, slice, enum.Enum, type),
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.CodeType, partial),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, torch.nn.Module, torch.optim.Optimizer),
)


def leaves(value: Any, prefix: str = "") -> list[Leaf]:
    """``(name, tensor)`` for each tensor in `value`, in order. A tensor by itself is named `prefix`.

    A container that is reached twice is walked once, under its first name; two names of one tensor are two leaves.
    """
    return list(_walk(value, prefix, {}))


def _walk(value: Any, prefix: str, seen: dict[int, Any]) -> Iterator[Leaf]:
    if isinstance(value, torch.Tensor):
        yield prefix, value
        return
    parts = _parts(value)
    if parts is None or id(value) in seen:
        return
    seen[id(value)] = value
    for key, item in parts[0]:
        yield from _walk(item, _join(prefix, key), seen)


def map_tensors(value: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with each tensor t replaced by ``fn(t)``, in the order of `leaves`; containers keep their type.

    `value` is not changed. A part without tensors is returned itself, not copied; a reference from inside a container
    back to it keeps pointing at the original.
    """
    return _map(value, fn, {})


def _map(value: Any, fn: Callable[[torch.Tensor], Any], done: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(value, torch.Tensor):
        return fn(value)
    parts = _parts(value)
    if parts is None:
        return value
    if id(value) in done:
        return done[id(value)][1]
    done[id(value)] = (value, value)
    items, rebuild = parts
    old = [item for _, item in items]
    new = [_map(item, fn, done) for item in old]
    if any(a is not b for a, b in zip(old, new)):
        done[id(value)] = (value, rebuild(new))
    return done[id(value)][1]


def lookup(value: Any, name: str) -> Any:
    """What `value` holds under the dotted `name`, by key or by attribute: ``lookup(batch, "meta.advantages")``.

    A key wins over an attribute. Raises PruneError that lists the names that exist.
    """
    found = value
    for step in name.replace("[", ".").replace("]", "").split("."):
        found = _child(found, step, name, value)
    return found


def _child(found: Any, step: str, name: str, root: Any) -> Any:
    if isinstance(found, Mapping) or _is_tensordict(found):
        if step in found.keys():  # noqa: SIM118 - a TensorDict iterates over its rows, not its keys
            return found[step]
    elif isinstance(found, (list, tuple)) and step.isdigit() and int(step) < len(found):
        return found[int(step)]
    if isinstance(step, str) and step.isidentifier() and hasattr(found, step):
        return getattr(found, step)
    exist = ", ".join(leaf for leaf, _ in leaves(root)) or "no tensor at all"
    raise PruneError(f"no {name!r} in a {type(root).__name__}: it has {exist}; use one of these names")


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a step returned: a tensor of one element, or the first of a tuple or list, or ``loss``.

    Raises PruneError that says what the step returned and what it should return.
    """
    loss = output
    if isinstance(output, Mapping) or hasattr(output, "loss"):
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    elif isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if not isinstance(loss, torch.Tensor):
        raise PruneError(f"the step returned {_describe(output)}: {_WANTED}")
    if loss.dim() > 0 and loss.numel() != 1:
        raise PruneError(f"the step returned a loss of shape {tuple(loss.shape)}: {_WANTED}")
    return loss


_WANTED = "return the scalar loss, a tuple that starts with it, or an object or dict with 'loss'"


def _describe(output: Any) -> str:
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} with keys {', '.join(map(repr, output)) or '(none)'}"
    if isinstance(output, (tuple, list)):
        return f"a {type(output).__name__} of {', '.join(type(item).__name__ for item in output) or 'nothing'}"
    return f"a {type(output).__name__}"


def _join(prefix: str, key: Any) -> str:
    if isinstance(key, int):
        return f"{prefix}[{key}]"
    return f"{prefix}.{key}" if prefix else str(key)


def _parts(value: Any) -> tuple[list[tuple[Any, Any]], Rebuild] | None:
    """The children of a container as ``(key, child)``, and how to make its like from new ones; else None."""
    if isinstance(value, _OPAQUE):
        return None
    if isinstance(value, Mapping) or _is_tensordict(value):
        items = [(key, value[key]) for key in value.keys()]  # noqa: SIM118 - as above
        return items, partial(_rebuild_mapping, value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value)), lambda new: type(value)(*new)
    if isinstance(value, (list, tuple)):
        return list(enumerate(value)), partial(_rebuild_sequence, value)
    if type(value) in pytree.SUPPORTED_NODES:
        children, context = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
        unflatten = pytree.SUPPORTED_NODES[type(value)].unflatten_fn
        return list(enumerate(children)), lambda new: unflatten(new, context)
    if is_dataclass(value):
        names = [field.name for field in fields(value) if hasattr(value, field.name)]
        names += [name for name in getattr(value, "__dict__", {}) if name not in names]
        return [(name, getattr(value, name)) for name in names], partial(_rebuild_object, value, names)
    if hasattr(value, "__dict__") and not callable(value):
        names = list(vars(value))
        return [(name, vars(value)[name]) for name in names], partial(_rebuild_object, value, names)
    return None


def _is_tensordict(value: Any) -> bool:
    return not isinstance(value, Mapping) and all(hasattr(value, name) for name in ("keys", "batch_size", "to_dict"))


def _rebuild_mapping(value: Any, new: list[Any]) -> Any:
    if not isinstance(value, MutableMapping) and not hasattr(value, "__setitem__"):
        return type(value)(dict(zip(value.keys(), new)))
    like = copy.copy(value)
    for key, item in zip(list(value.keys()), new):
        like[key] = item
    return like


def _rebuild_sequence(value: Any, new: list[Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(new)
    if isinstance(value, list):
        like = copy.copy(value)
        like[:] = new
        return like
    return type(value)(new)


def _rebuild_object(value: Any, names: list[str], new: list[Any]) -> Any:
    like = copy.copy(value)
    for name, item in zip(names, new):
        if getattr(value, name) is not item:
            object.__setattr__(like, name, item)
    return like
