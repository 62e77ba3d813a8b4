"""The ways in which a microbatch runs: live, observed, or pruned.

with run.segment():                   once or more, around all of the microbatch's own code
    output = ...
finished = run.finish(output)         the output for the caller; or a LiveRun, in which to run it once more
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from gradprune.dead import largest
from gradprune.facts import Condition, Dead, Live, Refusal, Verdict
from gradprune.guard import magnitude
from gradprune.meter import FlopMeter
from gradprune.microbatch import Microbatch
from gradprune.proofs import Proof
from gradprune.runs import DeadRun, ObservedRun, Rollback
from gradprune.trees import loss_of, map_tensors

if TYPE_CHECKING:
    from gradprune.pruner import Pruner


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
    """The microbatch as if nothing were wrapped. again: after a run that was in vain."""

    def __init__(self, pruner: Pruner, microbatch: Microbatch, why: Live, again: bool = False) -> None:
        self._pruner, self._microbatch, self._why, self._again = pruner, microbatch, why, again
        self._counting = Counting(pruner.meter, microbatch, dead=False)

    def segment(self) -> AbstractContextManager[None]:
        if self._again:
            self._pruner.parallel.prepare_repeat(self._microbatch.models.values())
        return self._counting.segment()

    def finish(self, output: Any) -> Any:
        if self._counting.counted:
            self._pruner.meter.count_backward(self._microbatch.shape, loss_of(output))
        self._pruner.note(self._microbatch, self._why)
        return output


class WatchedRun:
    """A live run that is recorded; where it proves dead, its output is cut off from its graph."""

    def __init__(self, pruner: Pruner, microbatch: Microbatch) -> None:
        self._pruner, self._microbatch = pruner, microbatch
        self._observed = ObservedRun(microbatch.models, microbatch.named)
        # As a dead one: where it is cut off from its graph, no backward will be seen.
        self._counting = Counting(pruner.meter, microbatch, dead=True)

    @contextmanager
    def segment(self) -> Iterator[None]:
        with self._counting.segment(), self._observed.segment():
            yield

    def finish(self, output: Any) -> Any:
        try:
            return self._conclude(output)
        finally:
            self.release()

    def release(self) -> None:
        """Let go of what was recorded; `finish` does, and who never gets there must."""
        self._observed.release()

    def _conclude(self, output: Any) -> Any:
        pruner, microbatch, loss = self._pruner, self._microbatch, loss_of(output)
        self._observed.gave(output, loss)
        proof = pruner.prove(microbatch, self._observed, loss)
        if isinstance(proof, Refusal) or isinstance(proof.verdict, Refusal):
            return self._refuse(output, proof if isinstance(proof, Refusal) else proof.verdict)
        if proof.unseen:
            why = Live("gradient may flow into a tensor that the model keeps on the side, which is not looked at")
            return LiveRun(pruner, microbatch, why).finish(output)
        audited = pruner.audited()
        if proof.hidden is not None and (audited or not proof.hidden.complete):
            return self._listen(output, proof)
        if any(pruner.schedule.stage_inputs(model) for model in microbatch.models.values()):
            # The stage before waits for a gradient, of a shape that recomputation may have cut up in this forward.
            why = Live("observed for its proof, while the stage before waits for its gradient")
            return LiveRun(pruner, microbatch, why).finish(output)
        boundary = self._observed.boundary()
        delivery = pruner.delivery(microbatch, proof)
        asked = [*boundary, *(proof.parameters() if audited else ())]
        kept = self._observed.shares_graph
        gradients = torch.autograd.grad(loss, asked, allow_unused=True, retain_graph=kept)
        for gradient in gradients[: len(boundary)]:
            if gradient is not None:
                delivery.see(magnitude(gradient))
        if audited:
            sizes = [magnitude(gradient) for gradient in gradients if gradient is not None]
            pruner.guard.note("audit", microbatch.about, largest(sizes))
        pruner.note(microbatch, Dead(microbatch.known.reason), audited=audited)
        return replaced(output, loss, delivery.detached(loss))

    def _listen(self, output: Any, proof: Proof) -> Any:
        """Leave the graph on, whose hidden part neither shows its leaves nor lets itself be asked for gradients."""
        pruner, microbatch, loss = self._pruner, self._microbatch, loss_of(output)
        assert proof.hidden is not None
        if not proof.hidden.complete:
            pruner.listen(proof.hidden, loss)
            why = Live("reentrant checkpointing hides which parameters are reached: this backward shows it")
            return LiveRun(pruner, microbatch, why).finish(output)
        pruner.hear(microbatch, proof.hidden, loss)
        return output

    def _refuse(self, output: Any, refusal: Verdict) -> Any:
        assert isinstance(refusal, Refusal)
        self._pruner.refused(refusal)
        why = Live(f"not proved: {refusal.reasons[0]}")
        return LiveRun(self._pruner, self._microbatch, why).finish(output)


class PrunedRun:
    """A run without a graph, which counts only if it made the calls that were proved."""

    def __init__(self, pruner: Pruner, microbatch: Microbatch, proof: Proof) -> None:
        self._pruner, self._microbatch = pruner, microbatch
        self._delivery = pruner.delivery(microbatch, proof)
        self._rollback = Rollback(proof.written_buffers(), {tensor.device for tensor in microbatch.named.values()})
        first = next(iter(microbatch.models.values()))

        def inside() -> AbstractContextManager[Sequence[torch.Tensor]]:
            self._rollback.keep_buffers()
            return pruner.schedule.dead_forward(first)

        self._dead = DeadRun(
            proof, microbatch.named, self._delivery, inside, pruner.looks_at_boundary(microbatch, proof), self._failed
        )
        self._counting = Counting(pruner.meter, microbatch, dead=True)

    @contextmanager
    def segment(self) -> Iterator[None]:
        with self._counting.segment(), self._dead.segment():
            yield

    def _failed(self, condition: Condition, size: torch.Tensor) -> None:
        self._delivery.see(size)
        self._pruner.guard.note("condition", f"{self._microbatch.about}, {condition}", size)

    def finish(self, output: Any) -> Any:
        """The output for the caller; a LiveRun if this was another program: random state and buffers are as before."""
        loss = loss_of(output)
        difference = self._dead.difference(loss)
        if difference is not None:
            return self.repeat(f"the step does something else than what was proved: {difference}")
        self._pruner.note(self._microbatch, Dead(self._microbatch.known.reason))
        if loss.requires_grad:
            return output
        return replaced(output, loss, self._delivery.detached(loss))

    @property
    def touched(self) -> bool:
        """Whether the model has run."""
        return self._dead.touched

    def repeat(self, why: str) -> LiveRun:
        """Put random state and buffers back; the microbatch must run again, from its start, in the run returned."""
        self._pruner.book.doubt(self._microbatch.family)
        self._rollback.restore()
        return LiveRun(self._pruner, self._microbatch, Live(why), again=True)


Run = LiveRun | WatchedRun | PrunedRun


def replaced(output: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    return map_tensors(output, lambda tensor: new if tensor is old else tensor)
