"""What only the device can tell, gathered without waiting for it and read once per optimizer step.

A dead microbatch notes magnitudes that are exactly zero if all is well: of the cotangent at the model's boundary, of
the advantages that the loss received, of an audited gradient. On a CPU they are read when an optimizer is about to
step; on another device a copy to the host is started there and read when it has arrived, at a later call, without
blocking.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradprune.errors import PruneError, StalePlanError, ViolationError

OnViolation = Literal["poison", "raise"]
Kind = Literal["boundary", "condition", "stale", "audit"]


def magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """Largest absolute value as a 0-dim float tensor on the same device; NaN if any is NaN, 0 for an empty tensor."""
    if tensor.numel() == 0:
        return torch.zeros((), device=tensor.device)
    if not tensor.is_floating_point():
        return (tensor != 0).any().float()
    return torch.linalg.vector_norm(tensor.detach(), ord=math.inf).float()


def poison_of(magnitude: torch.Tensor) -> torch.Tensor:
    """0 where `magnitude` is 0, else NaN: what to add to a gradient that was proved zero and is not."""
    return torch.where(magnitude == 0, 0.0, math.nan)


@dataclass(frozen=True)
class Note:
    """One magnitude to be read later; `about` names the microbatch and the conditions that it stands for."""

    kind: Kind
    about: str
    magnitude: torch.Tensor


class Arriving:
    """The numbers in a 1-dim tensor on their way to the host."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._host, self._arrived = numbers, None
        if numbers.device.type == "cuda":
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def values(self) -> list[float] | None:
        """The numbers; None if they have not arrived. Never waits."""
        return self._host.tolist() if self._arrived is None or self._arrived.query() else None

    def wait(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()


@dataclass
class Guard:
    """The notes of one compiled step. `poison` writes NaN into every gradient that the step reaches."""

    on_violation: OnViolation
    poison: Callable[[], None]
    _notes: list[Note] = field(default_factory=list)
    _flights: list[tuple[list[Note], Arriving]] = field(default_factory=list)

    def __post_init__(self) -> None:
        _guards.add(self)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def note(self, kind: Kind, about: str, magnitude: torch.Tensor) -> None:
        self._notes.append(Note(kind, about, magnitude))

    def before_optimizer_step(self) -> None:
        """Read, or start to read, what this optimizer step's microbatches noted."""
        notes, self._notes = self._notes, []
        if not notes:
            return
        stacked = torch.stack([note.magnitude for note in notes])
        if stacked.device.type == "cuda" and self.on_violation == "poison":
            self._flights.append((notes, Arriving(stacked)))
            return
        self._judge(notes, stacked.tolist())

    def poll(self) -> None:
        """Judge copies that have arrived; never waits."""
        while self._flights and (values := self._flights[0][1].values()) is not None:
            notes, _ = self._flights.pop(0)
            self._judge(notes, values)

    def check(self) -> None:
        """Judge everything noted so far; waits for the device."""
        for _, arriving in self._flights:
            arriving.wait()
        self.poll()
        notes, self._notes = self._notes, []
        if notes:
            self._judge(notes, torch.stack([note.magnitude for note in notes]).tolist())

    def _judge(self, notes: Iterable[Note], values: Iterable[float]) -> None:
        found = [(note, value) for note, value in zip(notes, values) if value != 0]
        if not found:
            return
        self.poison()
        wrong = [(note, value) for note, value in found if _is_wrong(note, value)]
        note, value = (wrong or found)[0]
        if wrong or self.on_violation == "raise":
            raise _error(note, value)


def _is_wrong(note: Note, value: float) -> bool:
    """Whether no unpruned run would have shown this: it is not just that the gradient is not finite."""
    return note.kind in ("stale", "audit") or (note.kind == "boundary" and math.isfinite(value))


def _error(note: Note, value: float) -> PruneError:
    if note.kind == "stale":
        return StalePlanError(
            f"{note.about} was planned dead, but the factors that the loss received reach {value:g}: make the plan "
            "from the same advantages and mask, and bind the batches in the plan's order. Gradients were set to NaN"
        )
    if note.kind == "audit":
        return ViolationError(
            f"{note.about} was proved dead, but an audited gradient reaches {value:g}: something inside the model adds "
            "gradient of its own (a router loss, a custom autograd.Function). Prove the whole step with "
            "gradprune.prove(step, (model, batch), wrt='parameters'), or do not prune this model"
        )
    if note.kind == "boundary" and math.isfinite(value):
        return ViolationError(
            f"{note.about} was proved dead, but the gradient at the model's output reaches {value:g}: the step "
            "computed something else than what was proved. Gradients were set to NaN; please report the step"
        )
    return ViolationError(
        f"{note.about}: the gradient of this dead microbatch is not finite, as it would be without pruning "
        "(0 * inf in the loss). Gradients were set to NaN: skip this optimizer step, or clamp the ratio in the loss"
    )


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()
_hooked = itertools.count()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for guard in list(_guards):
        guard.before_optimizer_step()


def watch_optimizers() -> None:
    """Have every torch optimizer of this process ask the guards before it steps; the first call registers."""
    if next(_hooked) == 0:
        register_optimizer_step_pre_hook(_before_step)
