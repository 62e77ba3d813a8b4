"""A plan bound to the batches of one pass over them, and how a step finds the microbatch of the batch in its hand.

Batches pass through unchanged; the link is their identity while they are the current one of a bound plan. Threads may
each run their own bound plans.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gradprune.errors import PlanError

Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True)
class PlannedMicrobatch:
    """What a plan says of one microbatch.

    index: its place among the microbatches of its rank and optimizer step. samples: its sequences, as indices into the
    rollout; empty in a filler. tokens: what its forward sees, padding included. padding: how many of these belong to
    no sequence, as far as the plan knows lengths. cost: of its forward, in the unit of the plan's cost function.
    filler: stands only for an equal count on every rank; feed `tokens` masked tokens.
    """

    index: int
    dead: bool
    reason: str
    samples: tuple[int, ...]
    tokens: int = 0
    cost: float = 0.0
    step: int = 0
    filler: bool = False
    padding: int = 0


# id of a batch -> (owner, the batch, what is planned), newest last. The batch is held so that its id stays its own.
_CURRENT: dict[int, list[tuple[object, Any, PlannedMicrobatch]]] = {}


def planned(batch: Any) -> PlannedMicrobatch | None:
    """What the bound plan that has just yielded this very object says of it; None for any other object.

    Where several bound plans hold the same object, the one that yielded it last speaks. ``None`` as a batch has no
    identity: use `BoundPlan.current`.
    """
    entries = _CURRENT.get(id(batch))
    return entries[-1][2] if entries else None


def any_current() -> bool:
    """Whether some bound plan stands at a batch: a step handed another object then tells the user to bind that one."""
    return bool(_CURRENT)


def _release(slot: list[int], owner: object) -> None:
    while slot:
        key = slot.pop()
        rest = [entry for entry in _CURRENT.pop(key, []) if entry[0] is not owner]
        if rest:
            _CURRENT[key] = rest


class BoundPlan(Generic[Batch]):
    """One pass over the batches of one rank, in plan order. Iterator and iterable; as Megatron's data iterator too.

    Reads exactly one batch a microbatch, none ahead. Data that ends early is a PlanError; a long-lived iterator is left
    where the plan ends. Leaving the loop early needs no care: the link goes with this object, or with `close`.
    """

    def __init__(self, microbatches: tuple[PlannedMicrobatch, ...], batches: Iterable[Batch] | None) -> None:
        self._microbatches = microbatches
        self._position = 0
        if isinstance(batches, Sized) and not hasattr(batches, "__next__") and len(batches) != len(microbatches):
            raise PlanError(
                f"the plan has {len(microbatches)} microbatches, the data has {len(batches)}: bind the batches that "
                "the plan was made for, in its order"
            )
        try:
            self._batches: Iterator[Any] | None = None if batches is None else iter(batches)
        except TypeError as error:
            raise PlanError(
                f"bind was given a {type(batches).__name__}, which cannot be iterated: pass the batches or an iterator"
            ) from error
        self._owner = object()
        self._slot: list[int] = []
        self._finalizer = weakref.finalize(self, _release, self._slot, self._owner)

    @property
    def current(self) -> PlannedMicrobatch | None:
        """What is planned for the batch yielded last; None before the first and after the last."""
        return self._microbatches[self._position - 1] if self._slot else None

    @property
    def upcoming(self) -> PlannedMicrobatch | None:
        """What is planned for the batch that the next ``next()`` gives; None at the end. Reads no data."""
        return self._microbatches[self._position] if self._position < len(self._microbatches) else None

    @property
    def position(self) -> int:
        """How many microbatches were yielded or skipped."""
        return self._position

    def skip(self) -> None:
        """Move past the upcoming microbatch without reading data: for a pipeline stage that reads none."""
        if self.upcoming is None:
            raise PlanError(f"all {len(self)} microbatches of the plan were used: call plan.bind for the next step")
        _release(self._slot, self._owner)
        self._position += 1

    def close(self) -> None:
        """Forget the current batch. The position stays."""
        _release(self._slot, self._owner)

    def __len__(self) -> int:
        return len(self._microbatches)

    def __iter__(self) -> BoundPlan[Batch]:
        if self._position and self.upcoming is None:
            raise PlanError(f"all {len(self)} microbatches of this bound plan were used: call plan.bind(batches) again")
        return self

    def __next__(self) -> Batch:
        _release(self._slot, self._owner)
        microbatch = self.upcoming
        if microbatch is None:
            raise StopIteration
        batch = None if self._batches is None else next(self._batches, self)
        if batch is self:
            raise PlanError(
                f"the plan has {len(self)} microbatches, the iterator ended after {self._position}: bind the batches "
                "that the plan was made for"
            )
        self._position += 1
        self._slot.append(id(batch))
        if batch is not None:
            _CURRENT.setdefault(id(batch), []).append((self._owner, batch, microbatch))
        return batch  # type: ignore[return-value]
