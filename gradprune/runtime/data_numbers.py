"""Python numbers that remember which tensor they came from.

``x.item()`` under a recorder gives one of these. Arithmetic on it stays marked while the recording is open, so that a
replay on other tensors can compute the number anew instead of taking the recorded value for a constant. Afterwards, and
to any other recording, it is a plain number: a running total does not grow a formula.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Formula:
    """A number computed from data: `function` of numbers and formulas; without one, the value of tensor `source`."""

    function: Callable[..., Any] | None
    operands: tuple[Any, ...] = ()
    source: int = -1


class Recording:
    """Whose numbers are whose. `open` while the recorder that made it observes."""

    open = True


class DataFloat(float):
    """A float that came from a tensor's value. A copy, and what is read from a file, is a plain one."""

    formula: Formula
    recording: Recording

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[float]]:
        return float, (float(self),)


class DataInt(int):
    """An int that came from a tensor's value. A copy, and what is read from a file, is a plain one."""

    formula: Formula
    recording: Recording

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[int]]:
        return int, (int(self),)


def marked(value: Any, formula: Formula, recording: Recording) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    marked = DataInt(value) if isinstance(value, int) else DataFloat(value)
    marked.formula, marked.recording = formula, recording
    return marked


def unmarked(value: Any, recording: Recording) -> Any:
    """The formula of a number of this recording; anything else as it is, a number of another recording plain."""
    return value.formula if getattr(value, "recording", None) is recording else plain(value)


def _arithmetic(name: str, function: Callable[..., Any], swapped: bool) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        if any(isinstance(other, torch.Tensor) for other in others):
            return NotImplemented
        base = float if isinstance(self, float) else int
        result = getattr(base, name)(self, *others)
        if result is NotImplemented or not self.recording.open:
            return result
        operands = (*others, self) if swapped else (self, *others)
        formulas = tuple(unmarked(operand, self.recording) for operand in operands)
        return marked(result, Formula(function, formulas), self.recording)

    return method


for _kind in (DataFloat, DataInt):
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        setattr(_kind, f"__{_name}__", _arithmetic(f"__{_name}__", getattr(operator, _name), swapped=False))
        setattr(_kind, f"__r{_name}__", _arithmetic(f"__r{_name}__", getattr(operator, _name), swapped=True))
    for _name in ("neg", "abs"):
        setattr(_kind, f"__{_name}__", _arithmetic(f"__{_name}__", getattr(operator, _name), swapped=False))


def plain(value: Any) -> Any:
    """Marked numbers as plain ones: torch's argument parser takes no subclass."""
    if isinstance(value, DataFloat):
        return float(value)
    if isinstance(value, DataInt):
        return int(value)
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    return value
