"""Side conditions of a proof, looked at on the device while a dead microbatch computes its loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gradprune.facts import BOUND, Condition
from gradprune.runtime.guard import magnitude
from gradprune.runtime.tape import Tape, call_name


@dataclass(frozen=True)
class Checks:
    """Conditions by the entry of the tape whose result they speak of, and by the name of the leaf.

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


def failure(condition: Condition, value: torch.Tensor) -> torch.Tensor:
    """0 if the condition holds of every element of `value`, else not 0; a 0-dim tensor on its device."""
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
