"""The Python state that a program reaches, put back after each trace: what a trace writes there has no data.

A program may count its calls, keep its last logits or cache a mask, in a closure, a global, a module, an object or a
class. Only what a trace changed is put back, object by object, so that other references to them stay valid.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from collections.abc import Callable, Iterable
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch

from gradprune.frames import is_user_file

_ABSENT = object()
_CACHE = type(functools.lru_cache(lambda: None))
_COLLECTIONS = (list, set, collections.deque)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)

#: A container with more items is put back, but not searched for others.
_MOST_ITEMS = 4096


class State:
    """What can be reached from `roots` by attributes, items, closures, and the names that reachable functions use."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}
        self._queue: list[Any] = list(roots)
        self._names: set[str] = set()
        self._waiting: dict[str, list[tuple[Any, dict[str, Any]]]] = {}
        while self._queue:
            value = self._queue.pop()
            if not isinstance(value, _PLAIN) and id(value) not in self._seen:
                self._seen[id(value)] = value
                self._visit(value)

    def restore(self) -> None:
        """Makes everything what it was when this was made."""
        for undo in self._undo:
            undo()

    def _visit(self, value: Any) -> None:
        if isinstance(value, dict):
            self._undo.append(functools.partial(_restore_dict, value, dict(dict.items(value))))
            self._search(dict.values(value))
        elif isinstance(value, _COLLECTIONS):
            self._undo.append(functools.partial(_restore_items, value, list(value)))
            self._search(value)
        elif isinstance(value, tuple | frozenset):
            self._search(value)
        elif isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, MethodType | staticmethod | classmethod):
            self._queue += (getattr(value, "__self__", None), value.__func__)
        elif isinstance(value, functools.partial):
            self._queue += (value.func, value.args, value.keywords)
        elif isinstance(value, property):
            self._queue += (value.fget, value.fset)
        elif isinstance(value, _CACHE):
            self._undo.append(functools.partial(_clear_cache, value, value.cache_info().misses))
            self._queue.append(value.__wrapped__)
        elif isinstance(value, CellType):
            content = _content(value)
            self._undo.append(functools.partial(_restore_cell, value, content))
            self._queue.append(content)
        elif isinstance(value, type | ModuleType):
            self._visit_namespace(value)
        elif isinstance(value, torch.nn.Module | SimpleNamespace) or _is_user_class(type(value)):
            self._queue += (getattr(value, "__dict__", None), type(value))
            for name in (slot for cls in type(value).__mro__ for slot in _slots(cls)):
                self._undo.append(functools.partial(_restore_slot, value, name, getattr(value, name, _ABSENT)))
                self._queue.append(getattr(value, name, None))

    def _search(self, items: Any) -> None:
        if len(items) <= _MOST_ITEMS:
            self._queue.extend(items)

    def _visit_function(self, function: FunctionType) -> None:
        self._queue += (*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__)
        self._queue += (vars(function), getattr(function, "__wrapped__", None))
        if is_user_file(function.__code__.co_filename):
            names = _names(function.__code__)
            for name in names:
                self._visit_member(function.__globals__, function.__globals__, name)
            self._release(names - self._names)

    def _visit_namespace(self, owner: type | ModuleType) -> None:
        """Members are visited once a function names them, those that nobody names at once."""
        user = _is_user_class(owner) if isinstance(owner, type) else _is_user_module(owner)
        if not user and not (isinstance(owner, type) and issubclass(owner, torch.nn.Module)):
            return
        for name in list(vars(owner)):
            if name in self._names or (isinstance(owner, type) and _is_called_unnamed(name)):
                self._visit_member(owner, vars(owner), name)
            else:
                self._waiting.setdefault(name, []).append((owner, vars(owner)))
        if isinstance(owner, type):
            self._queue += owner.__bases__

    def _visit_member(self, owner: Any, members: Any, name: str) -> None:
        value = members.get(name, _ABSENT)
        if not isinstance(value, FunctionType | type | ModuleType):
            self._undo.append(functools.partial(_restore_member, owner, members, name, value))
        self._queue.append(value)

    def _release(self, names: set[str]) -> None:
        self._names |= names
        for name in names & self._waiting.keys():
            for owner, members in self._waiting.pop(name):
                self._visit_member(owner, members, name)


def _names(code: CodeType) -> set[str]:
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, nested))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _is_called_unnamed(name: str) -> bool:
    """Whether a method is called by torch or by Python itself."""
    return name in ("forward", "backward", "setup_context") or name.startswith("__")


def _slots(cls: type) -> list[str]:
    return [name for name, member in vars(cls).items() if isinstance(member, MemberDescriptorType)]


def _is_user_class(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    return module is not None and _is_user_module(module)


def _is_user_module(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return module.__name__ == "__main__" or (isinstance(file, str) and is_user_file(file))


def _restore_dict(owner: dict[Any, Any], before: dict[Any, Any]) -> None:
    # Methods of the base: those of a subclass may do more.
    base: Any = collections.OrderedDict if isinstance(owner, collections.OrderedDict) else dict
    for key in [key for key in dict.keys(owner) if key not in before]:
        base.__delitem__(owner, key)
    for key, value in before.items():
        if dict.get(owner, key, _ABSENT) is not value:
            base.__setitem__(owner, key, value)


def _restore_items(owner: Any, before: list[Any]) -> None:
    base: Any = next(kind for kind in _COLLECTIONS if isinstance(owner, kind))
    if len(before) == base.__len__(owner) and all(a is b for a, b in zip(base.__iter__(owner), before)):
        return
    base.clear(owner)
    (base.update if base is set else base.extend)(owner, before)


def _restore_member(owner: Any, members: Any, name: str, before: Any) -> None:
    if _same(members.get(name, _ABSENT), before):
        return
    if isinstance(owner, dict):  # the globals of a function
        owner.update({name: before})
        if before is _ABSENT:
            del owner[name]
        return
    with contextlib.suppress(AttributeError, TypeError):  # read-only
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _same(now: Any, before: Any) -> bool:
    """Whether nothing is to be put back; a number may be made anew each time it is asked for."""
    return now is before or (type(now) is type(before) and isinstance(now, int | float | str) and now == before)


def _restore_slot(owner: Any, name: str, before: Any) -> None:
    if _same(getattr(owner, name, _ABSENT), before):
        return
    with contextlib.suppress(AttributeError, TypeError):  # read-only, as those of a timedelta
        if before is _ABSENT:
            delattr(owner, name)
        else:
            object.__setattr__(owner, name, before)


def _restore_cell(cell: CellType, before: Any) -> None:
    if _content(cell) is before:
        return
    if before is _ABSENT:
        del cell.cell_contents
    else:
        cell.cell_contents = before


def _clear_cache(cache: Any, misses: int) -> None:
    if cache.cache_info().misses != misses:
        cache.cache_clear()
