"""The running FLOP account of a compiled step: counts each kind of microbatch once, then only tallies."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gradprune.counting.fit import BatchShape, ShapeFit
from gradprune.counting.tape import Tape, record_backward, record_forward
from gradprune.counting.transfer import Cost, infer_cost
from gradprune.flops import FlopReport, Phases

MAX_COUNTED = 256
"""Microbatches counted at most; counting costs host time, and where shapes never settle it must end."""
MAX_TALLIES = 4096
"""Keys tallied apart before they are summed up, so that memory stays bounded."""


@dataclass
class _Tally:
    microbatches: int = 0
    tokens: int = 0
    padding: int = 0
    fillers: int = 0


class FlopMeter:
    """Tallies microbatches by a hashable `key`: equal keys mean equal shapes, so equal FLOPs.

    A `BatchShape` as key also lets the meter stop counting once the shapes that it has counted determine the others.

    Per microbatch: ``if meter.wants(key): run the forward inside meter.counting_forward(key)``, and for a live one
    ``meter.count_backward(key, loss)``; then ``meter.live(key, tokens)`` or ``meter.dead(key, tokens)``.
    """

    def __init__(self) -> None:
        self._live: dict[Hashable, _Tally] = {}
        self._dead: dict[tuple[Hashable, bool, bool], _Tally] = {}
        self._live_tapes: dict[Hashable, Tape] = {}
        self._dead_tapes: dict[Hashable, Tape] = {}
        self._fits: dict[Hashable, ShapeFit] = {}
        self._unlearned: dict[BatchShape, Tape] = {}
        self._predicted: dict[BatchShape, Phases] = {}
        self._settled = FlopReport()

    def live(self, key: Hashable, tokens: int, padding: int = 0, *, filler: bool = False) -> None:
        """One more microbatch that ran in full. tokens: real ones; padding: further slots of its tensors; filler: it
        holds no sample."""
        tally = self._live.get(key)
        if tally is None:
            self._settle_if_many()
            tally = self._live[key] = _Tally()
        tally.microbatches += 1
        tally.tokens += tokens
        tally.padding += padding
        tally.fillers += filler

    def dead(
        self,
        key: Hashable,
        tokens: int,
        padding: int = 0,
        *,
        forward: bool = True,
        backward: bool = False,
        filler: bool = False,
    ) -> None:
        """One more dead microbatch. forward: its forward ran (False where stored log-probs were reused); backward:
        its backward ran all the same (an audit); filler: it holds no sample."""
        tally = self._dead.get((key, forward, backward))
        if tally is None:
            self._settle_if_many()
            tally = self._dead[key, forward, backward] = _Tally()
        tally.microbatches += 1
        tally.tokens += tokens
        tally.padding += padding
        tally.fillers += filler

    def wants(self, key: Hashable, dead: bool = False) -> bool:
        """Whether the coming microbatch should be counted: its cost is not known yet, or only from a dead forward."""
        live = self._live_tapes.get(key)
        if (live is not None and (dead or live.awaits_backward)) or (dead and key in self._dead_tapes):
            return False
        return len(self._live_tapes) + len(self._dead_tapes) < MAX_COUNTED and self._predict(key) is None

    @contextmanager
    def counting_forward(self, key: Hashable, dead: bool = False) -> Iterator[None]:
        """Count the forward that runs inside; a forward that raises leaves no trace."""
        tape = Tape()
        with record_forward(tape):
            yield
        (self._dead_tapes if dead else self._live_tapes)[key] = tape
        if isinstance(key, BatchShape) and not dead:
            self._unlearned[key] = tape

    def count_backward(self, key: Hashable, loss: torch.Tensor) -> torch.Tensor:
        """Returns `loss` itself, whose backward will be counted for `key` by hooks on its graph, changing nothing.

        A microbatch whose forward was not counted is let through; one whose loss has no graph is not counted again.
        """
        tape = self._live_tapes.get(key)
        if tape is not None and loss.grad_fn is not None:
            record_backward(tape, loss)
        elif tape is not None:
            tape.awaits_backward = True
        return loss

    def cost(self, key: Hashable) -> Cost | None:
        """FLOPs of the unpruned step for `key`: counted, derived from a counted live step, or None if unknown."""
        live = self._live_tapes.get(key)
        if live is not None and live.saw_backward:
            return Cost(live.measured(), exact=True)
        forward_only = live or self._dead_tapes.get(key)
        if forward_only is None:
            phases = self._predict(key)
            return None if phases is None else Cost(phases, exact=True)
        measured = [tape for tape in self._live_tapes.values() if tape.saw_backward]
        return infer_cost(measured, forward_only)

    def _predict(self, key: Hashable) -> Phases | None:
        if not isinstance(key, BatchShape):
            return None
        if key in self._predicted:
            return self._predicted[key]
        for shape in [shape for shape, tape in self._unlearned.items() if tape.saw_backward]:
            tape = self._unlearned.pop(shape)
            self._fits.setdefault(shape.kind, ShapeFit()).learn(shape.features(), tape.measured())
        fit = self._fits.get(key.kind)
        phases = None if fit is None else fit.predict(key.features())
        if phases is not None:
            self._predicted[key] = phases
        return phases

    def _settle_if_many(self) -> None:
        if len(self._live) + len(self._dead) >= MAX_TALLIES:
            settled = self.report()
            self.reset()
            self._settled = settled
            self._predicted.clear()

    def report(self) -> FlopReport:
        """The account since the start or the last `reset`. Costs of the microbatches in flight are as known now."""
        report = self._settled
        costs = {key: self.cost(key) for key in {*self._live, *(key for key, _, _ in self._dead)}}
        for key, tally in self._live.items():
            report += _book_live(tally, costs[key])
        for (key, forward, backward), tally in self._dead.items():
            report += _book_dead(tally, costs[key], forward, backward)
        return report

    def reset(self) -> None:
        """Start the account at zero; what was learned about costs stays."""
        self._live.clear()
        self._dead.clear()
        self._settled = FlopReport()


def _book_live(tally: _Tally, cost: Cost | None) -> FlopReport:
    count = tally.microbatches
    total = cost.phases.total * count if cost else 0
    return FlopReport(
        total=total,
        live_run=cost.phases.scale(count) if cost else Phases(),
        microbatches_live=count,
        tokens_live=tally.tokens,
        padding_live=tally.padding,
        fillers=tally.fillers,
        estimated=total if cost and not cost.exact else 0,
        uncounted=0 if cost else count,
    )


def _book_dead(tally: _Tally, cost: Cost | None, forward: bool, backward: bool) -> FlopReport:
    count = tally.microbatches
    phases = cost.phases.scale(count) if cost else Phases()
    run = Phases(
        phases.forward if forward else 0, phases.backward if backward else 0, phases.recompute if backward else 0
    )
    pruned = Phases(
        0 if forward else phases.forward, 0 if backward else phases.backward, 0 if backward else phases.recompute
    )
    total = cost.phases.total * count if cost else 0
    return FlopReport(
        total=total,
        dead_run=run,
        dead_pruned=pruned,
        microbatches_dead=count,
        tokens_dead=tally.tokens,
        padding_dead=tally.padding,
        fillers=tally.fillers,
        estimated=total - phases.forward if cost and not cost.exact else 0,
        uncounted=0 if cost else count,
    )
