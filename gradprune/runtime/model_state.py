"""What a model's forward reads besides its arguments, and whether it changes any of it.

A forward that is computed again must find what it found the first time: attributes of its modules, their parameters,
which ``torch.func.functional_call`` swaps, their modes. One that changes something of its own (a counter, a cache, a
running mean in an attribute) is not computed again at all: see `lean`.
"""

from __future__ import annotations

import itertools
import random
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from gradprune.runtime.boundary import Call, modules_of
from gradprune.runtime.data_parallel import is_sharded
from gradprune.runtime.ledger import version_of

_SCALARS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)

#: How deep into the attributes of objects, and how far into containers, a change is looked for.
_DEPTH = 3
_ITEMS = 256

#: Arguments up to this size are copied, in case the caller writes to them before the backward.
_SMALL = 2**20


class ModelState:
    """The attributes, parameters, buffers and modes of a model's modules at this moment, by reference."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = modules_of(model)
        self._training = [module.training for module in self._modules]
        # Sharded modules exchange parameters in hooks of their own, around a recomputation too.
        kept = [] if any(map(is_sharded, self._modules)) else self._modules
        # Flat, and not a copy of each dict: thousands of objects would be a burden to Python's collector.
        places = ((module._parameters, module._buffers, vars(module)) for module in kept)
        self._places: list[dict[str, Any]] = list(itertools.chain.from_iterable(places))  # type: ignore[arg-type]
        self._keys = [key for place in self._places for key in place]
        self._values = [value for place in self._places for value in place.values()]
        self._sizes = [len(place) for place in self._places]
        self._owned = [p for module in kept for p in module._parameters.values() if p is not None]
        self._trained = [parameter.requires_grad for parameter in self._owned]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The model is as it was, inside; afterwards as it is now."""
        now = [ModelState(module) for module in self._modules[:1]]
        self._put()
        try:
            yield
        finally:
            for state in now:
                state._put()

    def _put(self) -> None:
        items = zip(self._keys, self._values)
        for place, size in zip(self._places, self._sizes):
            place.clear()
            place.update(itertools.islice(items, size))
        for module, training in zip(self._modules, self._training):
            module.training = training
        for parameter, trained in zip(self._owned, self._trained):
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)


class Arguments:
    """The tensors among a call's arguments at this moment."""

    def __init__(self, tensors: Collection[torch.Tensor]) -> None:
        self._held = {
            id(tensor): (tensor, version_of(tensor), tensor.clone() if self._is_copied(tensor) else None)
            for tensor in tensors
        }

    @staticmethod
    def _is_copied(tensor: torch.Tensor) -> bool:
        return not tensor.requires_grad and tensor.numel() <= _SMALL and tensor.layout == torch.strided

    def as_given(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, or what it was. Raises RuntimeError for a large one that was written to since."""
        held, version, copied = self._held.get(id(tensor), (tensor, version_of(tensor), None))
        if version_of(held) == version:
            return held
        if copied is None:
            raise RuntimeError(
                f"an argument of the model, {list(held.shape)}, was written to between its forward and its backward, "
                "which computes a part of the forward again: pass the model a copy"
            )
        return copied


def fingerprint(call: Call) -> tuple[Any, ...]:
    """What a forward may change, so that two of them differ if it did."""
    found: list[Any] = []
    for module in modules_of(call.module):
        held = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}
        found.append((id(module), *((key, _token(value)) for key, value in held.items())))
        found += [(key, _token(value)) for key, value in module._parameters.items()]
        found += [(key, id(value)) for key, value in module._buffers.items()]  # their values are watched elsewhere
    found += [_token(value) for value in (*call.args, *call.kwargs.values())]
    return tuple(found)


def keeps_state(call: Call) -> bool:
    """Whether a call can change what no `fingerprint` shows: it draws from a generator of its own, or is given an
    object to work on."""
    if isinstance(call.module, torch.jit.ScriptModule):
        return True
    values = (value for module in modules_of(call.module) for value in vars(module).values())
    if any(isinstance(value, _GENERATORS) for value in values):
        return True
    return not all(map(_is_plain, (*call.args, *call.kwargs.values())))


def _is_plain(value: Any) -> bool:
    """Whether a value is nothing but tensors and constants, in containers."""
    if isinstance(value, (torch.Tensor, *_SCALARS, *_FUNCTIONS)):
        return True
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if is_dataclass(value):
        return all(_is_plain(getattr(value, item.name, None)) for item in fields(value))
    return False


def _token(value: Any, depth: int = 0) -> Any:
    """What to compare of a value: itself, if it is a constant; else which one it is, and what it holds."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    ours = type(value).__module__.startswith("gradprune.")  # such as the hooks that are on the model while it runs
    if ours or depth == _DEPTH or isinstance(value, (torch.nn.Module, *_FUNCTIONS)):
        return id(value)
    if isinstance(value, Mapping):
        held: Iterable[Any] = value.values()
    elif isinstance(value, Collection):
        held = value
    else:
        held = getattr(value, "__dict__", {}).values()
    return id(value), *(_token(item, depth + 1) for item in itertools.islice(held, _ITEMS)), _length(value)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Collection) else 0
