"""Side conditions of a proof, looked at on the device while a dead microbatch computes its loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradprune.facts import BOUND, Condition
from gradprune.runtime.guard import magnitude
from gradprune.runtime.tape import Tape, call_name

Failed = Callable[[Condition, torch.Tensor], None]


@dataclass(frozen=True)
class Checks:
    """Conditions by the entry of the tape in which the value is computed that they speak of, and by the name of the
    leaf.

    complete: every condition is among them. Where it is not, only the loss's own backward, run up to the model's
    output, shows whether they held.
    """

    entries: Mapping[int, tuple[Condition, ...]]
    leaves: Mapping[str, tuple[Condition, ...]]
    complete: bool


def checks_of(conditions: Sequence[Condition], tape: Tape) -> Checks:
    """Where to look at `conditions` of a certificate that was made from `tape`."""
    entries: dict[int, tuple[Condition, ...]] = {}
    leaves: dict[str, tuple[Condition, ...]] = {}
    names = {leaf.name for leaf in tape.leaves}
    # A Function's inner calls are calls of the trace, and a hook is none: then calls and entries are not the same.
    aligned = not any(call_name(entry.function).endswith(("apply", "hook")) for entry in tape.entries)
    for condition in conditions:
        if condition.value in names:
            leaves[condition.value] = (*leaves.get(condition.value, ()), condition)
        elif aligned and condition.call is not None:
            entries[condition.call] = (*entries.get(condition.call, ()), condition)
        else:
            return Checks({}, {}, complete=False)
    return Checks(entries, leaves, complete=True)


class Looker:
    """Looks at the conditions of `checks` in one run, and tells `failed` of each: see `failure`.

    missed: there was a condition that it could not look at.
    """

    def __init__(self, checks: Checks, failed: Failed) -> None:
        self._checks, self._failed = checks, failed
        self.missed = False

    def leaf(self, name: str, tensor: torch.Tensor) -> None:
        """The leaf `name` of the tape is `tensor`."""
        for condition in self._checks.leaves.get(name, ()):
            self._failed(condition, failure(condition, tensor.detach()))

    def inside(self, entry: int) -> AbstractContextManager[Any]:
        """For the time in which the call of `entry` runs."""
        wanted = [condition for condition in self._checks.entries.get(entry, ()) if condition.inside]
        return _Inside(self, wanted) if wanted else nullcontext()

    def result(self, entry: int, result: torch.Tensor) -> None:
        """The call of `entry` gave `result`."""
        for condition in self._checks.entries.get(entry, ()):
            if not condition.inside:
                self._failed(condition, failure(condition, result.detach()))


class _Inside(TorchDispatchMode):
    """Looks at what the operators of one call compute."""

    supports_higher_order_operators = True

    def __init__(self, looker: Looker, conditions: Sequence[Condition]) -> None:
        super().__init__()
        self._looker, self._conditions = looker, conditions
        self._seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        for condition in self._conditions:
            if condition.inside == name and isinstance(result, torch.Tensor):
                self._seen[name] += 1
                self._looker._failed(condition, failure(condition, result))
        return result

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if any(self._seen[name] != count for name, count in Counter(c.inside for c in self._conditions).items()):
            self._looker.missed = True


def failure(condition: Condition, value: torch.Tensor) -> torch.Tensor:
    """0 if the condition holds of every element of `value`, else not 0; a 0-dim tensor on its device."""
    if condition.along is not None and value.dim() and value.shape[condition.along]:
        value = value.select(condition.along, 0)
    if condition.kind == "finite":
        return _largest(value) * 0
    if condition.kind == "bounded":
        return (_largest(value) <= BOUND).logical_not().float()
    if condition.kind == "notnan":
        return _largest(value).isnan().float()
    if condition.kind == "nonzero":
        return (value == 0).any().float()
    return torch.full((), float(value.numel() == 0), device=value.device)


def _largest(value: torch.Tensor) -> torch.Tensor:
    """`magnitude` of any kind of number: one pass over logits, no tensor of their size."""
    if value.is_floating_point():
        return magnitude(value)
    return magnitude(value.abs() if value.is_complex() else value.double())
