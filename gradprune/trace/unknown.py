"""A stand-in for data that has left torch during a trace, or that torch cannot compute without data.

Whatever is computed from it is unknown as well; asking what it is, to branch or to count, stops the trace.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

import mpmath
import sympy

from gradprune.errors import TraceError
from gradprune.facts import SourceLine
from gradprune.frames import is_user_file, source_line

_ALGEBRA = tuple(os.path.join(os.path.dirname(package.__file__), "") for package in (sympy, mpmath))


@cache  # asked at each isinstance() of a symbol
def is_program_file(path: str) -> bool:
    """Whether a file holds code that a traced program runs, not the algebra that torch's symbols are made of."""
    return is_user_file(path) and not path.startswith(_ALGEBRA)


class Stopped(BaseException):
    """Ends a trace with a TraceError. Not an Exception: the traced program must not catch it and go on."""

    def __init__(self, error: TraceError) -> None:
        super().__init__(str(error))
        self.error = error


class NeedsSymbolicBuiltins(BaseException):
    """The module with these globals turns a symbolic number into a Python one. Not an Exception: see `Stopped`."""

    def __init__(self, module: dict[str, Any], error: TraceError) -> None:
        super().__init__(module.get("__name__"))
        self.module, self.error = module, error


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of user code at or above `frame`."""
    while frame is not None and not is_program_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def refuse_number(error: TraceError) -> None:
    """Stops because a number that a trace does not know is needed, unless its module can be made to do without."""
    frame = user_frame(sys._getframe(1))
    raise Stopped(error) if frame is None else NeedsSymbolicBuiltins(frame.f_globals, error)


def prefer_symbolic_extremum() -> None:
    """Stops where ``max`` or ``min`` of the user's line would branch on a number, if its module can do without."""
    frame = user_frame(sys._getframe(1))
    if frame is None or "max" in frame.f_globals:
        return
    text = source_line(frame.f_code.co_filename, frame.f_lineno).text
    if re.search(r"\b(max|min)\(", text):
        raise NeedsSymbolicBuiltins(frame.f_globals, TraceError("max or min of data", None))


class Unknown:
    """A value of which nothing is known. `made` says what it was, for the message that stops a trace."""

    def __init__(self, made: str, where: SourceLine | None) -> None:
        object.__setattr__(self, "made", made)
        object.__setattr__(self, "where", where)

    def refuse(self, *_: Any, **__: Any) -> Any:
        raise Stopped(self._error())

    def _number(self) -> Any:
        refuse_number(self._error())

    def _error(self) -> TraceError:
        message = f"the program depends on the value of {self.made}, which a trace does not know"
        return TraceError(message, self.where)

    def _same(self, *_: Any, **__: Any) -> Unknown:
        return self

    def __getattr__(self, name: str) -> Unknown:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __repr__(self) -> str:
        return f"<{self.made}>"

    def __format__(self, spec: str) -> str:
        return repr(self)

    # torch and numpy functions of an unknown value are unknown.
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return first_unknown((args, kwargs or {}))

    def __array_function__(self, *_: Any) -> Unknown:
        return self

    def __array_ufunc__(self, *_: Any, **__: Any) -> Unknown:
        return self

    __call__ = __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _same
    __neg__ = __pos__ = __abs__ = __invert__ = __round__ = __floor__ = __ceil__ = __trunc__ = _same
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _same  # type: ignore[assignment]
    __int__ = __float__ = _number
    __bool__ = __index__ = __len__ = __iter__ = __contains__ = __array__ = refuse
    __hash__ = object.__hash__


class LazyList(Unknown):
    """The list of a tensor's values whose sizes are symbols: counting or reading them makes the sizes constants."""

    def __init__(self, fill: Callable[[], list[Any]], where: SourceLine | None) -> None:
        super().__init__("a tensor's values as a list", where)
        object.__setattr__(self, "fill", fill)
        object.__setattr__(self, "values", None)

    def _filled(self) -> list[Any]:
        if self.values is None:
            object.__setattr__(self, "values", self.fill())
        values: Any = self.values
        return values

    def __iter__(self) -> Any:
        return iter(self._filled())

    def __len__(self) -> int:
        return len(self._filled())

    def __getitem__(self, index: Any) -> Any:
        return self._filled()[index]


def filled(value: Any) -> Any:
    """`value` with each LazyList in nested lists and tuples replaced by the list itself."""
    if isinstance(value, LazyList):
        return value._filled()
    if type(value) in (list, tuple):
        return type(value)(filled(item) for item in value)
    return value


def first_unknown(value: Any) -> Unknown | None:
    """The first Unknown in nested lists, tuples and dicts."""
    if isinstance(value, Unknown):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((found for item in items if (found := first_unknown(item)) is not None), None)
