"""The collectives that a step issues itself. They write to tensors, and no version counter of a tensor tells."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradprune.tape import tensors_in

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
    originals = {name: method for name, method in vars(group).items() if _may_write(name, method)}
    for name in originals:
        setattr(group, name, _reporting(getattr(group, name), report))
    try:
        yield
    finally:
        for name, method in originals.items():
            setattr(group, name, method)


def _may_write(name: str, method: Any) -> bool:
    return callable(method) and not isinstance(method, type) and not name.startswith(("__", "_pybind", "send"))


def _reporting(function: Callable[..., Any], report: Report) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        written = tensors_in(list(args[:1]) or list(kwargs.values())[:1])  # every one takes what it writes to first
        if written:
            report(written)
        return result

    return method
