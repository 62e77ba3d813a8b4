"""Live microbatches like others before them: planned so, and of a kind whose FLOPs are known. They are only booked.

A training with a plan takes this path for each live microbatch, so that it is short: nothing is looked at but shapes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gradprune.counting.fit import BatchShape
from gradprune.planning.binding import PlannedMicrobatch, planned
from gradprune.runtime.batch import batch_leaves, is_flat
from gradprune.runtime.known import examine
from gradprune.runtime.microbatch import shape_of, slots_of
from gradprune.runtime.pruner import Pruner

#: Kinds remembered at most.
_MANY = 4096


class _Kind(NamedTuple):
    """shape: key of its FLOPs. slots: positions that its factors have. replicated: DistributedDataParallel is in it."""

    shape: BatchShape
    slots: int
    replicated: bool


class Routine:
    """Recognizes the routine microbatches of one step, and books them.

    counts: whether FLOPs of live microbatches are counted: then what is not counted yet is no routine.
    """

    def __init__(self, pruner: Pruner, counts: bool) -> None:
        self._pruner, self._counts = pruner, counts
        self._kinds: dict[tuple[Any, ...], _Kind] = {}

    def find(self, model: torch.nn.Module, batch: Any) -> tuple[int, PlannedMicrobatch, _Kind] | None:
        """What `book` must be told once the coming microbatch has run; None if it is no routine.

        Raises PruneError for factors that a batch, the first of its kind, does not have.
        """
        plan = planned(batch)
        if plan is None or plan.dead or type(batch) is not dict:
            return None
        shapes = [value.shape if type(value) is torch.Tensor else type(value) for value in batch.values()]
        key = (id(model), model.training, *batch, *shapes)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._new(model, batch)
            if kind is None:
                return None
            if len(self._kinds) == _MANY:
                self._kinds.clear()
            self._kinds[key] = kind
        self._pruner.settle()
        return self._pruner.next_index(), plan, kind

    def book(self, model: torch.nn.Module, found: tuple[int, PlannedMicrobatch, _Kind]) -> None:
        """The microbatch of `found` ran live."""
        index, plan, kind = found
        self._pruner.ran_as_planned(index, plan, kind.shape, kind.slots)
        if kind.replicated:
            self._pruner.parallel.ran_live((model,))

    def _new(self, model: torch.nn.Module, batch: dict[Any, Any]) -> _Kind | None:
        if not is_flat(batch):
            return None
        hypothesis = self._pruner.policy.hypothesis
        examine(batch, hypothesis, allow_sync=False)
        named = batch_leaves(batch)
        shape = shape_of({"": model}, named)
        if self._counts and self._pruner.meter.wants(shape):
            return None
        return _Kind(shape, slots_of(named, hypothesis.factors), self._pruner.parallel.replicates(model))
