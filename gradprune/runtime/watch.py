"""Compare a running step with a tape: the complete guard of a proof against whatever Python state the step reads.

A step that makes the calls of the tape, with the same operands, to the same loss, computes what was proved, whatever
closures, globals, configuration or clock led it there. Further calls, for metrics, are let through as long as nothing
that they touch is read by the tape afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradprune.runtime.checks import Looker
from gradprune.runtime.data_numbers import Formula
from gradprune.runtime.ledger import Ledger
from gradprune.runtime.recorder import EFFECTS, CallObserver
from gradprune.runtime.tape import (
    NUMBER,
    Entry,
    Leaf,
    Ref,
    Size,
    Tape,
    autocast_state,
    kind_of,
    number_of,
    size_of,
    tensors_in,
)

#: Calls that change how gradient flows through a tensor that they are given, beside those of the recorder.
_REWIRING = EFFECTS | {"requires_grad_", "detach_", "set_"}
#: Calls that give something else each time.
_RANDOM = frozenset(
    """alpha_dropout bernoulli binomial dropout dropout1d dropout2d dropout3d empty empty_like empty_strided
    feature_alpha_dropout feature_dropout fractional_max_pool2d fractional_max_pool3d gumbel_softmax multinomial
    native_dropout new_empty new_empty_strided normal poisson rand rand_like randint randint_like randn randn_like
    randperm rrelu scaled_dot_product_attention multi_head_attention_forward""".split()
)


class _Differs(Exception):
    """An operand is not the one on the tape."""


class TapeWatch(CallObserver):
    """Matches the calls made while `observing` with those of a tape, in order."""

    def __init__(self, tape: Tape, look: Looker | None = None) -> None:
        """look: shown each entry that was matched, the first tensor of its result, and the leaves."""
        super().__init__()
        self._tape, self._look = tape, look
        self._wrt = {leaf.number for leaf in tape.leaves if leaf.role == "wrt"}
        self._leaves = {leaf.name: leaf for leaf in tape.leaves}
        self._open = {leaf.number: leaf for leaf in tape.leaves if leaf.name.startswith(("outside.", "parameters."))}
        self._ledger = Ledger()
        self._shapes: dict[int, torch.Size] = {}
        self._items: dict[int, Any] = {}
        self._trial: dict[int, Any] = {}
        self._free = {leaf.number for leaf in tape.leaves if leaf.name.startswith(NUMBER)}
        self._position = self._written = 0
        self._passed: dict[Any, list[int]] = {}
        self._spoiled: str | None = None
        self.entrances: dict[int, GradientEdge] = {}

    def bind(self, name: str, tensor: torch.Tensor) -> None:
        """Say which tensor a leaf of the tape is; a name that the tape does not read is ignored."""
        leaf = self._leaves.get(name)
        if leaf is not None:
            self._check_kind(leaf, tensor)
            self._enter(tensor, leaf.number)
            if self._look is not None:
                self._look.leaf(name, tensor)

    def matches(self, loss: torch.Tensor) -> bool:
        """Whether all calls of the tape were made and `loss` is what they lead to."""
        done = self._spoiled is None and self._position == len(self._tape.entries)
        return done and self._ledger.number(loss) == self._tape.loss

    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the leaves that were met, by name."""
        return {name: self._shapes[leaf.number] for name, leaf in self._leaves.items() if leaf.number in self._shapes}

    def difference(self) -> str:
        """Where the run left the tape, for a reader."""
        if self._spoiled is not None:
            return self._spoiled
        if self._position == len(self._tape.entries):
            return "its loss is another tensor"
        entry = self._tape.entries[self._position]
        return f"it did not come to {getattr(entry.function, '__name__', 'a call')} at {entry.where}"

    def observe(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        entry = self._next()
        found = self._fit(entry, func, args, kwargs) if entry is not None else None
        if found and self._look is not None:
            for opened, tensor in found.items():
                self._look.leaf(self._open[opened].name, tensor)  # before the call, which may write to it
        with nullcontext() if found is None or self._look is None else self._look.inside(self._position):
            result = func(*args, **kwargs)
        if name == "item":
            number = self._ledger.number(args[0])
            if number is not None:
                self._items[number] = result
        elif entry is not None and found is not None:
            self._advance(entry, found, result, args, kwargs)
        elif (same := self._again(func, args, kwargs)) is not None:
            for number, tensor in zip(same.results, tensors_in(result)):
                self._assign(tensor, number)
        else:
            self._look_at_other_call(name, args, kwargs)
        return result

    def _look_at_other_call(self, name: str, args: Any, kwargs: Any) -> None:
        """A call that is not on the tape, for a metric say, must leave what is on it alone."""
        if name in _REWIRING and name != "__setitem__" and any(map(self._is_known, tensors_in((args, kwargs)))):
            self._spoiled = f"it called {name} on a tensor of the loss"
        elif _writes(name) or "out" in kwargs:
            self._ledger.void_hidden_writes(tensors_in((args[:1], kwargs.get("out"))))

    def backward_begins(self) -> None:
        self._spoiled = "a backward runs inside the microbatch, before its own"

    def written(self, tensors: list[torch.Tensor]) -> None:
        self._ledger.void(tensors)

    def _next(self) -> Entry | None:
        entries = self._tape.entries
        return entries[self._position] if self._position < len(entries) else None

    def _again(self, func: Any, args: Any, kwargs: Any) -> Entry | None:
        """The entry that this call makes a second time, of operands that were not written to since.

        A step that computes the same thing for a metric and for the loss may give either to the tape.
        """
        if getattr(func, "__name__", "") in _RANDOM:
            return None
        for index in self._passed.get(func, ()):
            entry = self._tape.entries[index]
            if index >= self._written and not entry.mutates and self._fit(entry, func, args, kwargs) == {}:
                return entry
        return None

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return self._ledger.ever(tensor) is not None

    def _fit(self, entry: Entry, func: Any, args: Any, kwargs: Any) -> dict[int, torch.Tensor] | None:
        """Tensors found for open leaves if this call is `entry`; None if it is not."""
        if entry.function != func or entry.grad != torch.is_grad_enabled() or entry.autocast != autocast_state():
            return None
        found: dict[int, torch.Tensor] = {}
        self._trial = {}
        try:
            self._compare(entry.args, args, found)
            self._compare(entry.kwargs, kwargs, found)
        except _Differs:
            return None
        return found

    def _compare(self, spec: Any, value: Any, found: dict[int, torch.Tensor]) -> None:
        if isinstance(spec, Ref):
            self._compare_tensor(spec.number, value, found)
        elif isinstance(spec, Size):
            _require(type(value) is int and value == size_of(spec, lambda n, d: self._shapes[n][d]))
        elif isinstance(spec, Formula) and spec.source in self._free:
            _require(type(value) in (int, float) and math.isfinite(value))
            self._trial[spec.source] = value
        elif isinstance(spec, Formula):
            _require(type(value) in (int, float) and _equal(value, number_of(spec, self._item)))
        elif isinstance(spec, slice):
            _require(isinstance(value, slice))
            for part in ("start", "stop", "step"):
                self._compare(getattr(spec, part), getattr(value, part), found)
        elif isinstance(spec, list | tuple):
            _require(isinstance(value, list | tuple) and len(value) == len(spec))
            for inner, item in zip(spec, value):
                self._compare(inner, item, found)
        elif isinstance(spec, dict):
            _require(isinstance(value, dict) and list(value) == list(spec))
            for key, inner in spec.items():
                self._compare(inner, value[key], found)
        else:
            _require(type(value) is type(spec) and _equal(value, spec))

    def _compare_tensor(self, number: int, value: Any, found: dict[int, torch.Tensor]) -> None:
        _require(isinstance(value, torch.Tensor))
        known = found.get(number)
        if known is not None:
            _require(known is value)
            return
        actual = self._ledger.number(value)
        if actual is None and number in self._open:
            _require(self._open[number].role == "wrt" or not value.requires_grad)
            found[number] = value
            return
        _require(actual == number)

    def _advance(self, entry: Entry, found: dict[int, torch.Tensor], result: Any, args: Any, kwargs: Any) -> None:
        self._passed.setdefault(entry.function, []).append(self._position)
        self._position += 1
        if entry.mutates:
            self._written = self._position
        self._free.difference_update(self._trial)
        self._items.update(self._trial)
        tensors = tensors_in(result)
        if self._look is not None and tensors:
            self._look.result(self._position - 1, tensors[0])
        for number, tensor in found.items():
            self._check_kind(self._open.pop(number), tensor)
            self._enter(tensor, number)
        written = self._ledger.accept_writes(tensors_in((args, kwargs)))
        if not set(written) <= set(entry.mutates):
            self._spoiled = f"tensors share memory that did not when it was proved, at {entry.where}"
        for number, tensor in zip(entry.results, tensors):
            self._assign(tensor, number)

    def _check_kind(self, leaf: Leaf, tensor: torch.Tensor) -> None:
        if leaf.kind != kind_of(tensor):
            self._spoiled = f"{leaf.name} is {kind_of(tensor)}, and was {leaf.kind} when it was proved"

    def _item(self, number: int) -> Any:
        _require(number in self._items)
        return self._items[number]

    def _enter(self, tensor: torch.Tensor, number: int) -> None:
        """A leaf of the tape turned out to be `tensor`. `entrances`: where gradient would come to such leaves."""
        if number in self._wrt and tensor.requires_grad:
            self.entrances[number] = get_gradient_edge(tensor)
        self._assign(tensor, number)

    def _assign(self, tensor: torch.Tensor, number: int) -> None:
        self._ledger.assign(tensor, number)
        self._shapes[number] = tensor.shape


def _writes(name: str) -> bool:
    """Whether a call of this name writes to its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_")


def _require(holds: bool) -> None:
    if not holds:
        raise _Differs


def _equal(value: Any, expected: Any) -> bool:
    if value is expected:
        return True
    try:
        return bool(value == expected) or (value != value and expected != expected)
    except (RuntimeError, ValueError, TypeError):  # an array, say: not a constant of a program
        return False
