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

from gradprune.runtime.ledger import version_of
from gradprune.runtime.modes import Settings

Forward = Callable[[], Any]


class _Saved:
    """Stands for the `index`-th tensor that was saved."""

    __slots__ = ("index", "tensor")

    def __init__(self, index: int) -> None:
        self.index = index
        self.tensor: torch.Tensor | None = None


class Unsaved:
    """One forward. again: opened around the second run of it; that must save tensors of the same sizes, in the same
    order. Nested tensors are kept: each is of a size of its own."""

    def __init__(self, forward: Forward, again: AbstractContextManager[Any]) -> None:
        self._forward, self._again, self._settings = forward, again, Settings()
        self._sizes: list[int] = []
        self._complete = False
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._has_run_again = False
        self._lock = threading.RLock()  # nodes of several devices run in threads of their own

    def run(self) -> Any:
        """What the forward gives. Once."""
        with saved_tensors_hooks(self._pack, self._unpack):
            output = self._forward()
        self._complete = True
        return output

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(len(self._sizes))
        if tensor.is_nested:
            saved.tensor = tensor.detach()
            self._sizes.append(0)
        else:
            self._sizes.append(tensor.numel())
        return saved

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        with self._lock:
            if saved.tensor is None:
                if not self._has_run_again:
                    self._run_again()
                saved.tensor = self._take(saved.index)
        return saved.tensor

    def _take(self, index: int) -> torch.Tensor:
        tensor, self._tensors[index] = self._tensors[index], _TAKEN
        if version_of(tensor) != self._versions[index]:
            raise RuntimeError(
                f"a tensor {list(tensor.shape)} that the model's backward needs was written to after it was saved, in "
                "place: one of the variables needed for gradient computation has been modified by an inplace operation"
            )
        return tensor

    def _run_again(self) -> None:
        sizes: list[int] = []
        self._tensors, self._versions = [], []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(0 if tensor.is_nested else tensor.numel())
            kept = tensor.detach()  # not the graph of this run, which would keep itself alive
            self._tensors.append(kept)
            self._versions.append(version_of(kept))
            return kept

        hooks = saved_tensors_hooks(keep, lambda kept: kept)
        with torch.inference_mode(False), torch.enable_grad(), self._again, self._settings.lent(), hooks:
            self._forward()
        self._has_run_again = True
        if self._complete and sizes != self._sizes:
            raise RuntimeError(
                f"the model's forward saved {len(self._sizes)} tensors of {sum(self._sizes)} elements, and "
                f"{len(sizes)} of {sum(sizes)} when it was run again for its backward: it depends on something that "
                "changed since"
            )


_TAKEN = torch.empty(0, device="cpu")
