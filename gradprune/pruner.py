"""What a compiled step and a compiled loop share: decide about a microbatch, run it that way, keep the books.

run = pruner.start(microbatch)        live, observed or dead
with run.segment():                   once or more, around all of the microbatch's own code
    output = ...
finished = run.finish(output)         the output for the caller; or a LiveRun, in which to run it once more
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gradprune.data_parallel import DataParallel
from gradprune.dead import Delivery, largest
from gradprune.errors import NoEffectWarning, PruneError, TraceError
from gradprune.explanation import Decision, Explanation
from gradprune.facts import Certificate, Condition, Dead, Hypothesis, Live, Reason, Refusal, Verdict
from gradprune.flop_fit import BatchShape
from gradprune.flops import FlopReport
from gradprune.frames import user_line
from gradprune.graphs import Arrivals
from gradprune.guard import Guard, OnViolation, magnitude, watch_optimizers
from gradprune.known import Known
from gradprune.meter import FlopMeter
from gradprune.planner import StepPlan
from gradprune.proof_cache import proved_tape, shapes_of
from gradprune.proofs import Proof, ProofBook
from gradprune.runs import DeadRun, ObservedRun, Rollback, family
from gradprune.schedule import Schedule
from gradprune.tape import Tape
from gradprune.trees import loss_of, map_tensors

_REMEMBERED = 10_000

#: One in so many dead microbatches with a costly boundary has the cotangent there looked at.
SAMPLED = 8

#: So many programs that differ in numbers only (weights of a microbatch, say) are proved with those numbers left open.
ALIKE = 3


@dataclass(frozen=True)
class Policy:
    """What the user asks for; see `gradprune.compile`. Raises PruneError for what makes no sense."""

    hypothesis: Hypothesis
    audit: float
    on_violation: OnViolation
    strict: bool

    def __post_init__(self) -> None:
        if not 0 <= self.audit <= 1:
            raise PruneError(f"audit is {self.audit}: pass a share between 0 and 1")
        if self.on_violation not in ("poison", "raise"):
            raise PruneError(f"on_violation is {self.on_violation!r}: pass 'poison' or 'raise'")


@dataclass(frozen=True)
class Microbatch:
    """One microbatch before it runs. models: by name (``""`` for the only one). named: its tensors by name."""

    index: int
    models: Mapping[str, torch.nn.Module]
    known: Known
    named: Mapping[str, torch.Tensor]
    constants: tuple[Any, ...] = ()

    @functools.cached_property
    def family(self) -> tuple[Any, ...]:
        """What is known before it runs of the program that it will be."""
        return family(self.models, self.named, self.constants)

    @functools.cached_property
    def shape(self) -> BatchShape:
        """Key of its FLOPs."""
        modes = tuple((id(model), model.training) for model in self.models.values())
        return BatchShape.of(self.named.values(), program=(modes, tuple(self.named)))

    @property
    def about(self) -> str:
        place = f" (planned as {self.known.plan.index})" if self.known.plan else ""
        return f"microbatch {self.index}{place}"

    def tokens(self, factors: tuple[str, ...]) -> int:
        if self.known.plan and self.known.plan.tokens:
            return self.known.plan.tokens
        wanted = {*factors, *(f"batch.{factor}" for factor in factors)}
        return max((tensor.numel() for name, tensor in self.named.items() if name in wanted), default=0)


class Pruner:
    """Proofs, guard, FLOP account and decisions of one step or loop. name: for a reader. function: the user's code."""

    def __init__(self, function: Callable[..., Any], name: str, policy: Policy, schedule: Schedule) -> None:
        self.policy, self.schedule = policy, schedule
        self.book = ProofBook(function)
        self.guard = Guard(policy.on_violation, self._poison)
        self.meter = FlopMeter()
        self.parallel = DataParallel()
        self._name = name
        self._decisions: deque[Decision] = deque(maxlen=_REMEMBERED)
        self._calls = self._pruned = 0
        self._warned = False
        self._alike: Counter[Any] = Counter()
        self._stages_may_prune = False
        self._listening: list[Arrivals] = []
        watch_optimizers()

    def explain(self) -> Explanation:
        return Explanation(self._name, tuple(self._decisions), tuple(self.book.verdicts()))

    def report(self) -> FlopReport:
        return self.meter.report()

    # Deciding -----------------------------------------------------------------------------------------------------

    def microbatch(
        self,
        models: Mapping[str, torch.nn.Module],
        known: Known,
        named: Mapping[str, torch.Tensor],
        constants: tuple[Any, ...] = (),
    ) -> Microbatch:
        """The next microbatch. constants: Python values that are likely to choose another program."""
        self._calls += 1
        return Microbatch(self._calls - 1, models, known, named, constants)

    def start(self, microbatch: Microbatch) -> Run:
        way = self.way(microbatch)
        if isinstance(way, Live):
            return LiveRun(self, microbatch, way)
        if way is None or not way.runnable or self.audited():
            return WatchedRun(self, microbatch)
        return PrunedRun(self, microbatch, way)

    def agree(self, plan: StepPlan) -> StepPlan:
        plan, self._stages_may_prune = self.schedule.agree(plan, self.book.settled())
        return plan

    def unproved_stage(self) -> Live | None:
        """Why a pipeline stage that computes no loss may not prune yet."""
        if self._stages_may_prune:
            return None
        return Live("the stage that computes the loss had no proof when ranks last agreed: step.agree(plan)")

    def way(self, microbatch: Microbatch) -> Live | Proof | None:
        """Live with its reason, a proof to run dead by, or None: observe it, then decide."""
        self._stop_listening()
        forbidden = self.forbidden(microbatch)
        if forbidden is not None:
            return forbidden
        proof = self.book.expected(microbatch.family)
        if proof is None and self.book.full():
            return Live("the step computed too many different things to prove each")
        if proof is not None and isinstance(proof.verdict, Refusal):
            return Live(f"not proved: {proof.verdict.reasons[0]}")
        return proof

    def forbidden(self, microbatch: Microbatch) -> Live | None:
        """Why this microbatch runs live whatever was proved."""
        if not microbatch.known.holds:
            return Live(microbatch.known.reason)
        if not torch.is_grad_enabled():
            return Live("gradients are switched off")
        objection = self.schedule.objection(microbatch.known.plan)
        if objection is None:
            objection = self.parallel.objection(microbatch.models.values())
        if objection is not None:
            return Live(objection)
        if (reason := self.schedule.refusal()) is not None:
            self.refused(Refusal(self.policy.hypothesis, (), (reason,), self._name))
            return Live(str(reason))
        return None

    def audited(self) -> bool:
        """Whether the coming dead microbatch is one of those whose backward is run all the same."""
        count = self._pruned
        return int(-(-(count + 1) * self.policy.audit // 1)) > int(-(-count * self.policy.audit // 1))

    def looks_at_boundary(self, microbatch: Microbatch, proof: Proof) -> bool:
        """Whether the coming dead microbatch runs the loss's own backward: each one, unless it is costly and there is
        another way to see whether the proof's side conditions hold, and no wrapper follows the graph of its outputs."""
        if self.parallel.hears_all(microbatch.models.values()):
            return True
        return not (proof.wide and proof.checks.complete) or self._pruned % SAMPLED == 0

    def prove(self, microbatch: Microbatch, run: ObservedRun, loss: torch.Tensor) -> Proof | Refusal:
        """The proof of what `run` computed, known or new; a Refusal where it cannot be put to the proof."""
        try:
            tape, tensors = run.tape(loss)
        except TraceError as error:
            where: Any = error.where
            return Refusal(self.policy.hypothesis, (), (Reason("untraceable", str(error), where),), self._name)
        found = self._known(microbatch, tape, tensors) or self._new(microbatch, run, tape, tensors, loss)
        self.book.saw(microbatch.family, *found)
        return found[1]

    def _known(
        self, microbatch: Microbatch, tape: Tape, tensors: list[torch.Tensor]
    ) -> tuple[tuple[Any, ...], Proof] | None:
        """A program of the book that speaks of `tape`: itself, or one with numbers left open that is proved."""
        shapes = shapes_of(tape, tensors)
        for candidate in (tape, tape.opened()[0]):
            program = (microbatch.family, candidate.content())
            proof = self.book.known(program, shapes)
            if proof is not None and (proof.verdict or candidate is tape):
                return program, proof
        return None

    def _new(
        self, microbatch: Microbatch, run: ObservedRun, tape: Tape, tensors: list[torch.Tensor], loss: torch.Tensor
    ) -> tuple[tuple[Any, ...], Proof]:
        """The proof of a new program; where only numbers set it apart from others, of all such programs at once."""
        opened, numbers = tape.opened()
        alike = (microbatch.family, opened.content())
        self._alike[alike] += 1
        if numbers and self._alike[alike] == ALIKE:
            values = [torch.tensor(number, dtype=torch.float64) for number in numbers]
            verdict, admission = proved_tape(opened, [*tensors, *values], self._name, self.policy.hypothesis)
            if verdict:
                return alike, run.proof(verdict, opened, admission, loss)
        verdict, admission = proved_tape(tape, tensors, self._name, self.policy.hypothesis)
        return (microbatch.family, tape.content()), run.proof(verdict, tape, admission, loss)

    def refused(self, refusal: Refusal) -> None:
        """Warn of the first refusal, as long as nothing was proved. Raises PruneError for any if strict."""
        if self.policy.strict:
            raise PruneError(f"strict: {refusal}")
        proved = any(isinstance(verdict, Certificate) for verdict in self.book.verdicts())
        if not self._warned and not proved:
            self._warned = True
            place = user_line()
            warnings.warn_explicit(
                f"{self._name} runs live: {refusal}",
                NoEffectWarning,
                place.file if place else __file__,
                place.line if place else 1,
            )

    def listen(
        self, arrivals: Arrivals, loss: torch.Tensor, heard: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        """Learn what the coming backward from `loss` reaches."""
        arrivals.listen(loss, heard)
        self._listening.append(arrivals)

    def hear(self, microbatch: Microbatch, arrivals: Arrivals, loss: torch.Tensor) -> None:
        """Audit a dead microbatch whose graph was left on by its own backward: each gradient must be zero."""
        note = functools.partial(self.guard.note, "audit", microbatch.about)
        self.listen(arrivals, loss, lambda gradient: note(magnitude(gradient)))
        self.note(microbatch, Dead(microbatch.known.reason), audited=True)

    def _stop_listening(self) -> None:
        while self._listening:
            self._listening.pop().close()

    # Accounting ---------------------------------------------------------------------------------------------------

    def delivery(self, microbatch: Microbatch, proof: Proof) -> Delivery:
        report = functools.partial(self.guard.note, "boundary", microbatch.about)
        to_all = self.parallel.hears_all(microbatch.models.values())
        delivery = Delivery(proof.parameters(), report, to_all=to_all)
        residue = microbatch.known.residue()
        if residue is not None:
            self.guard.note("stale", microbatch.about, residue)
            delivery.see(residue)
        return delivery

    def note(self, microbatch: Microbatch, outcome: Live | Dead, audited: bool = False) -> None:
        self._decisions.append(Decision(microbatch.index, outcome))
        tokens = microbatch.tokens(self.policy.hypothesis.factors)
        if outcome:
            self.meter.live(microbatch.shape, tokens)
            self.parallel.ran_live(microbatch.models.values())
            return
        self._pruned += 1
        plan = microbatch.known.plan
        self.meter.dead(microbatch.shape, tokens, backward=audited, filler=bool(plan and plan.filler))

    def _poison(self) -> None:
        for proof in self.book.proofs():
            for parameter in proof.parameters():
                gradient = getattr(parameter, "main_grad", None)
                gradient = parameter.grad if gradient is None else gradient
                if gradient is not None:
                    gradient.fill_(float("nan"))


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
        proof = pruner.prove(microbatch, self._observed, loss)
        if isinstance(proof, Refusal) or isinstance(proof.verdict, Refusal):
            return self._refuse(output, proof if isinstance(proof, Refusal) else proof.verdict)
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
        gradients = torch.autograd.grad(loss, asked, allow_unused=True)
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
