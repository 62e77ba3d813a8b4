"""Which tensor is which while a program runs: numbers by identity, void once a tensor is written to unseen."""

from __future__ import annotations

import weakref

import torch


class Ledger:
    """Numbers tensors without keeping any alive. A number is void if the tensor's version is not the one last seen."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._versions: dict[int, int] = {}
        self._void: set[int] = set()
        self._spoiled: set[int] = set()

    def number(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor; None for one never seen, or written to since it was."""
        number = self.ever(tensor)
        valid = number is not None and number not in self._void and self._versions[number] == version_of(tensor)
        return number if valid else None

    def ever(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor, void or not."""
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def assign(self, tensor: torch.Tensor, number: int) -> None:
        self._known[id(tensor)] = (weakref.ref(tensor), number)
        self._versions[number] = version_of(tensor)

    def void(self, tensors: list[torch.Tensor]) -> None:
        """`tensors` were written to in a way that no version shows: what shares their memory is unknown from now on."""
        memory = set(map(_memory, tensors)) - {0}
        self._spoiled |= memory
        for reference, number in self._known.values():
            tensor = reference()
            if tensor is not None and _memory(tensor) in memory:
                self._void.add(number)

    def void_hidden_writes(self, tensors: list[torch.Tensor]) -> None:
        """`tensors` were written to: what shares their memory and does not show it, as ``x`` when ``x.data`` is, is
        unknown from now on."""
        memory = set(map(_memory, tensors)) - {0}
        for reference, number in self._known.values():
            tensor = reference()
            if tensor is not None and self._versions[number] == version_of(tensor) and _memory(tensor) in memory:
                self._void.add(number)

    def spoiled(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor, seen before or not, was ever declared void."""
        return _memory(tensor) in self._spoiled if self._spoiled else False

    def accept_writes(self, tensors: list[torch.Tensor]) -> tuple[int, ...]:
        """Take what was just written to `tensors`, and to all that share their memory, as seen: their numbers."""
        written = [tensor for tensor in tensors if self.ever(tensor) is not None and self.number(tensor) is None]
        memory = set(map(_memory, written)) - {0}
        if not written:
            return ()
        numbers = []
        for reference, number in list(self._known.values()):
            tensor = reference()
            if tensor is None or number in self._void:
                continue
            shares = _memory(tensor) in memory or any(tensor is one for one in written)
            if shares and self._versions[number] == version_of(tensor):
                self._void.add(number)  # as `x` is when `x.data` is written to: its version does not show it
            elif shares:
                self._versions[number] = version_of(tensor)
                numbers.append(number)
        return tuple(sorted(numbers))


def _memory(tensor: torch.Tensor) -> int:
    """Where the data of a tensor is, or those of its part on this rank; 0 where it has none."""
    try:
        return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()
    except RuntimeError:  # a subclass that wraps another tensor
        return 0


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; one made in inference mode is not counted, nor written to outside of it."""
    return 0 if tensor.is_inference() else tensor._version
