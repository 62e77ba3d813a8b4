"""Side conditions of a proof, looked at on the device while a dead microbatch computes its loss."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradprune.facts import BOUND, Condition
from gradprune.runtime.guard import magnitude
from gradprune.runtime.tape import Entry, Tape, call_name

Failed = Callable[[Condition, torch.Tensor], None]


@dataclass(frozen=True)
class Checks:
    """Conditions by the entry of the tape in which the value is computed that they speak of, and by the name of the
    leaf.

    complete: every condition is among them, and tells whether the gradient is finite. Where it is not, only the loss's
    own backward, run up to the model's output, shows whether they held.
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
        call = condition.call
        if condition.exact and call is None and condition.value in names:
            leaves[condition.value] = (*leaves.get(condition.value, ()), condition)
        elif condition.exact and call is not None and aligned and _can_be_seen(condition, tape.entries[call]):
            entries[call] = (*entries.get(call, ()), condition)
        else:
            return Checks({}, {}, complete=False)
    return Checks(entries, leaves, complete=True)


def _can_be_seen(condition: Condition, entry: Entry) -> bool:
    """Whether the value that `condition` speaks of is the only tensor that the call of `entry` gives, or inside of it:
    the result of a write in place is another in the trace."""
    return bool(condition.inside) or (len(entry.results) == 1 and not entry.mutates)


class Looker:
    """Looks at the conditions of `checks` in one run, and tells `failed` of each: see `failure`.

    missed: there is a condition that it has not looked at, or not once.
    """

    def __init__(self, checks: Checks, failed: Failed) -> None:
        self._checks, self._failed = checks, failed
        self._looked: Counter[Condition] = Counter()
        self._ignored: dict[int, torch.Tensor] = {}
        every = itertools.chain(*checks.leaves.values(), *checks.entries.values())
        self._ignoring = {condition.ignoring for condition in every}

    @property
    def missed(self) -> bool:
        every = itertools.chain(*self._checks.leaves.values(), *self._checks.entries.values())
        return any(self._looked[condition] != 1 for condition in every)

    def look(self, condition: Condition, value: torch.Tensor) -> None:
        """`value` is what `condition` speaks of."""
        value = value.detach()
        if condition.ignoring is not None:
            ignored = self._ignored.get(condition.ignoring)
            if ignored is None or ignored.numel() != value.numel():
                return
            value = value.reshape(-1).masked_fill(ignored, 1.0)
        self._looked[condition] += 1
        self._failed(condition, failure(condition, value))

    def labels(self, entry: int, labels: torch.Tensor, ignored: int) -> None:
        """The cross entropy of `entry` has these labels, and ignores those equal to `ignored`."""
        self._ignored[entry] = (labels == ignored).reshape(-1)

    def leaf(self, name: str, tensor: torch.Tensor) -> None:
        """The leaf `name` of the tape is `tensor`."""
        for condition in self._checks.leaves.get(name, ()):
            self.look(condition, tensor)

    def inside(self, entry: int) -> AbstractContextManager[Any]:
        """For the time in which the call of `entry` runs."""
        wanted = [condition for condition in self._checks.entries.get(entry, ()) if condition.inside]
        return _Inside(self, entry, wanted) if wanted or entry in self._ignoring else nullcontext()

    def result(self, entry: int, result: torch.Tensor) -> None:
        """The call of `entry` gave `result`."""
        for condition in self._checks.entries.get(entry, ()):
            if not condition.inside:
                self.look(condition, result)


_NLL = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")


class _Inside(TorchDispatchMode):
    """Looks at what the operators of one call compute."""

    supports_higher_order_operators = True

    def __init__(self, looker: Looker, entry: int, conditions: Sequence[Condition]) -> None:
        super().__init__()
        self._looker, self._entry, self._conditions = looker, entry, conditions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name in _NLL:
            self._looker.labels(self._entry, args[1], args[4])
        for condition in self._conditions:
            if condition.inside == name and isinstance(result, torch.Tensor):
                self._looker.look(condition, result)
        return result


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
