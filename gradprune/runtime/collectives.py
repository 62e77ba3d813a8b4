"""The collectives that a step issues itself. They write to tensors, and no version counter of a tensor tells."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradprune.runtime.tape import tensors_in

Report = Callable[[list[torch.Tensor]], None]


@contextmanager
def reported(report: Report) -> Iterator[None]:
    """Calls `report` with the tensors that a collective of this process writes to, after each that is issued inside.

    Seen are those issued from Python through a ``ProcessGroup``, however the function was imported. An asynchronous one
    may write later than it is reported.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        yield
        return
    group: Any = torch.distributed.ProcessGroup
    methods = _methods(group)
    outer = _current.report
    _current.report = report
    for name, (_, reporting) in methods.items():
        setattr(group, name, reporting)
    try:
        yield
    finally:
        _current.report = outer
        for name, (method, reporting) in methods.items():
            setattr(group, name, method if outer is None else reporting)


class _Current(threading.local):
    report: Report | None = None


_current = _Current()


@functools.cache
def _methods(group: Any) -> dict[str, tuple[Any, Any]]:
    """The methods of a ``ProcessGroup`` that may write, and the same methods when they report."""
    found = {name: method for name, method in vars(group).items() if _may_write(name, method)}
    return {name: (method, _reporting(getattr(group, name))) for name, method in found.items()}


def _may_write(name: str, method: Any) -> bool:
    return callable(method) and not isinstance(method, type) and not name.startswith(("__", "_pybind", "send"))


def _reporting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        written = tensors_in(list(args[:1]) or list(kwargs.values())[:1])  # every one takes what it writes to first
        if written and _current.report is not None:
            _current.report(written)
        return result

    return method
