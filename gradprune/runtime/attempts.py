"""The ways in which a microbatch runs: live, observed, or pruned.

run = start(pruner, microbatch)
with run.segment():                   once or more, around all of the microbatch's own code
    output = ...
output = run.finish(output)           for the caller
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from gradprune.counting.meter import FlopMeter
from gradprune.facts import Condition, Dead, Live, Refusal, Verdict
from gradprune.runtime.checks import Looker
from gradprune.runtime.graphs import Arrivals, Reach
from gradprune.runtime.guard import magnitude
from gradprune.runtime.microbatch import Microbatch
from gradprune.runtime.modes import without_collections
from gradprune.runtime.proofs import Proof
from gradprune.runtime.pruner import Pruner
from gradprune.runtime.runs import DeadRun, ObservedRun
from gradprune.trees import loss_of, map_tensors


class Counting:
    """Counts the FLOPs of a microbatch's first segment, if the meter wants them."""

    def __init__(self, meter: FlopMeter, microbatch: Microbatch, dead: bool) -> None:
        self._meter, self._key, self._dead = meter, microbatch.shape, dead
        self._begun = False
        self.counted = False

    @contextmanager
    def segment(self) -> Iterator[None]:
        self.counted = self.counted or (not self._begun and self._meter.wants(self._key, self._dead))
        first, self._begun = not self._begun, True
        if not (first and self.counted):
            yield
            return
        with self._meter.counting_forward(self._key, self._dead):
            yield


class LiveRun:
    """The microbatch as if nothing were wrapped."""

    def __init__(self, pruner: Pruner, microbatch: Microbatch, why: Live) -> None:
        self._pruner, self._microbatch, self._why = pruner, microbatch, why
        self._counting = Counting(pruner.meter, microbatch, dead=False)

    def segment(self) -> AbstractContextManager[None]:
        return self._counting.segment()

    def release(self) -> None:
        """Let go of what was recorded; who started the run calls it last, whatever happens."""

    def finish(self, output: Any) -> Any:
        if self._counting.counted:
            self._pruner.meter.count_backward(self._microbatch.shape, loss_of(output))
        self._pruner.note(self._microbatch, self._why)
        return output

    def give_up(self, output: Any, why: str) -> Any:
        """The end of a run that led to no loss."""
        self._pruner.note(self._microbatch, Live(why))
        return output


class WatchedRun:
    """A live run that is recorded; where it proves dead, its output is cut off from its graph."""

    def __init__(self, pruner: Pruner, microbatch: Microbatch) -> None:
        self._pruner, self._microbatch = pruner, microbatch
        self._observed = ObservedRun(microbatch.models, microbatch.named, pruner.schedule)
        # As a dead one: where it is cut off from its graph, no backward will be seen.
        self._counting = Counting(pruner.meter, microbatch, dead=True)

    @contextmanager
    def segment(self) -> Iterator[None]:
        with self._counting.segment(), self._observed.segment():
            yield

    def release(self) -> None:
        self._observed.release()

    def give_up(self, output: Any, why: str) -> Any:
        """The end of a run that led to no loss."""
        self._pruner.note(self._microbatch, Live(why))
        return output

    def finish(self, output: Any) -> Any:
        pruner, microbatch, loss = self._pruner, self._microbatch, loss_of(output)
        proof = pruner.prove(microbatch, self._observed, loss)
        if isinstance(proof, Refusal) or isinstance(proof.verdict, Refusal):
            return self._refuse(output, proof if isinstance(proof, Refusal) else proof.verdict)
        if not microbatch.known.still_holds():
            return self._run_live(output, CHANGED)
        reach = self._observed.reach(loss)
        if (objection := self._observed.objection(reach)) is not None:
            proof.against.append(objection)
            return self._run_live(output, objection)
        audited = pruner.audited()
        if audited or not proof.runnable or pruner.trust.asks(proof, reach, self._observed.recomputes()):
            return self._listen(output, proof, reach, audited)
        if any(pruner.schedule.stage_inputs(model) for model in microbatch.models.values()):
            # The stage before waits for a gradient, of a shape that recomputation may have cut up in this forward.
            return self._run_live(output, "observed for its proof, while the stage before waits for its gradient")
        numbers, edges = list(self._observed.entrances), list(self._observed.entrances.values())
        # Retained: the user may keep parts of the graph and differentiate them.
        gradients = torch.autograd.grad(loss, edges, allow_unused=True, retain_graph=not reach.once)
        proof.silent.update(number for number, gradient in zip(numbers, gradients) if gradient is None)
        delivery = pruner.delivery(microbatch, pruner.reached(self._observed.reach(loss, proof.silent), proof))
        for gradient in gradients:
            if gradient is not None:
                delivery.stands(magnitude(gradient))
        self._observed.cut_off()
        pruner.ended(microbatch)
        pruner.note(microbatch, Dead(microbatch.known.reason))
        return replaced(output, loss, delivery.ending(loss))

    def _listen(self, output: Any, proof: Proof, reach: Reach, audited: bool) -> Any:
        """Leave the graph on, and look at the gradients that its own backward makes."""
        pruner, microbatch, loss = self._pruner, self._microbatch, loss_of(output)
        heard = None
        if audited:
            heard = pruner.hear(microbatch, Arrivals(reach.leaves), loss)
        elif pruner.trust.asks(proof, reach, self._observed.recomputes()):
            heard = pruner.try_out(microbatch, proof, reach, loss)
        if proof.hidden is not None:
            pruner.listen(proof.hidden, loss, heard)
        return output if audited else self._run_live(output, TRIAL)

    def _run_live(self, output: Any, why: str) -> Any:
        return LiveRun(self._pruner, self._microbatch, Live(why)).finish(output)

    def _refuse(self, output: Any, refusal: Verdict) -> Any:
        assert isinstance(refusal, Refusal)
        self._pruner.refused(refusal)
        why = Live(f"not proved: {refusal.reasons[0]}")
        return LiveRun(self._pruner, self._microbatch, why).finish(output)


class PrunedRun:
    """A run that saves no activations, and is cut off from its graph if it made the calls that were proved."""

    def __init__(self, pruner: Pruner, microbatch: Microbatch, proof: Proof) -> None:
        self._pruner, self._microbatch, self._proof = pruner, microbatch, proof
        self._failures: list[tuple[Condition, torch.Tensor]] = []
        self._look: Looker | None = None
        if not pruner.looks_at_boundary(proof):
            self._look = Looker(proof.checks, lambda *failure: self._failures.append(failure))
        model = next(iter(microbatch.models.values()))
        self._dead = DeadRun(proof, microbatch.named, microbatch.buffers, model, pruner.schedule, self._look)
        self._counting = Counting(pruner.meter, microbatch, dead=True)

    @contextmanager
    def segment(self) -> Iterator[None]:
        with without_collections(), self._counting.segment(), self._dead.segment():
            yield

    @without_collections()
    def finish(self, output: Any) -> Any:
        """The output for the caller; what runs live after all computes its activations when its backward comes."""
        pruner, microbatch, loss = self._pruner, self._microbatch, loss_of(output)
        difference = self._dead.difference(loss)
        if difference is None and not microbatch.known.still_holds():
            difference = CHANGED
        if difference is None and not loss.requires_grad:
            difference = "its loss has no graph"
        if difference is not None:
            pruner.book.doubt(microbatch.family)
            return self.give_up(output, f"the step does something else than what was proved: {difference}")
        reach = self._dead.reach(loss)
        if (objection := self._dead.objection(reach)) is not None:
            return self.give_up(output, objection)
        if not self._dead.hides and pruner.trust.asks(self._proof, reach, recomputes=False):
            pruner.try_out(microbatch, self._proof, reach, loss)
            return self.give_up(output, TRIAL)
        self._dead.cut_off()
        pruner.ended(microbatch)
        delivery = pruner.delivery(microbatch, pruner.reached(reach, self._proof))
        for condition, size in self._failures:
            about = f"{microbatch.about}, {condition}"
            delivery.failed(size, functools.partial(pruner.guard.note, "condition", about))
        pruner.note(microbatch, Dead(microbatch.known.reason))
        looks_at_end = self._look is None or self._look.missed
        entrances = list(self._dead.entrances.values()) if looks_at_end else ()
        return replaced(output, loss, delivery.ending(loss, entrances, reach.once))

    def release(self) -> None:
        self._dead.release()

    def give_up(self, output: Any, why: str) -> Any:
        """Go on as a live microbatch."""
        self._dead.went_live()
        self._pruner.note(self._microbatch, Live(why))
        return output


Run = LiveRun | WatchedRun | PrunedRun


def start(pruner: Pruner, microbatch: Microbatch) -> Run:
    """The run of `microbatch` that `pruner` decides for."""
    way = pruner.way(microbatch)
    if isinstance(way, Live):
        return LiveRun(pruner, microbatch, way)
    if way is None or not way.runnable or not pruner.trust.sure(way) or pruner.audited():
        return WatchedRun(pruner, microbatch)
    return PrunedRun(pruner, microbatch, way)


CHANGED = "the factors were written to while the step ran"
TRIAL = "in full, on trial: what the model does in its backward is not known from its graph"


def replaced(output: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    return map_tensors(output, lambda tensor: new if tensor is old else tensor)
