"""A graph that keeps none of the tensors that it saves: its forward is run again for all of them when one is asked for.

As `torch.utils.checkpoint` does it without reentrance, with less to do for each tensor: a graph of a few thousand
saved tensors that nobody asks for costs the host hardly more than one that keeps them. It is run again once; what was
asked for lives as long as the node of the graph that saved it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from gradprune.runtime.modes import Autocast

Forward = Callable[[], Any]


class _Saved:
    """Stands for the `index`-th tensor that was saved."""

    __slots__ = ("index", "tensor")

    def __init__(self, index: int) -> None:
        self.index = index
        self.tensor: torch.Tensor | None = None


class Unsaved:
    """One forward. again: opened around the second run of it; that must save as many tensors, in the same order."""

    def __init__(self, forward: Forward, again: AbstractContextManager[Any]) -> None:
        self._forward, self._again, self._autocast = forward, again, Autocast()
        self._count = 0
        self._complete = False
        self._tensors: list[torch.Tensor | None] | None = None
        self._lock = threading.RLock()  # nodes of several devices run in threads of their own

    def run(self) -> Any:
        """What the forward gives. Once."""
        with saved_tensors_hooks(self._pack, self._unpack):
            output = self._forward()
        self._complete = True
        return output

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(self._count)
        self._count += 1
        return saved

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        with self._lock:
            if self._tensors is None:
                self._tensors = self._run_again()
            if saved.tensor is None:
                saved.tensor, self._tensors[saved.index] = self._tensors[saved.index], None
        assert saved.tensor is not None
        return saved.tensor

    def _run_again(self) -> list[torch.Tensor | None]:
        tensors: list[torch.Tensor | None] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor.detach())  # not the graph of this run, which would keep itself alive
            return tensors[-1]  # type: ignore[return-value]

        with self._again, self._autocast.lent(), torch.enable_grad(), saved_tensors_hooks(keep, lambda kept: kept):
            self._forward()
        if self._complete and len(tensors) != self._count:
            raise RuntimeError(
                f"the model's forward saved {self._count} tensors, and {len(tensors)} when it was run again for its "
                "backward: it depends on something that changed since"
            )
        return tensors
