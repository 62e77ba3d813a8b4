"""What a compiled step and a compiled loop share: decide about a microbatch, keep the books.

`attempts.start` runs it that way.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter

from gradprune.counting.fit import BatchShape
from gradprune.counting.meter import FlopMeter
from gradprune.errors import NoEffectWarning, PruneError, TraceError
from gradprune.explanation import Decision, Explanation
from gradprune.facts import Certificate, Dead, Live, Reason, Refusal
from gradprune.flops import FlopReport
from gradprune.frames import user_line
from gradprune.planner import PlannedMicrobatch, StepPlan
from gradprune.runtime.boundary import modules_of
from gradprune.runtime.data_parallel import DataParallel
from gradprune.runtime.dead import Delivery
from gradprune.runtime.graphs import Arrivals, Reach
from gradprune.runtime.guard import Guard, magnitude, watch_optimizers
from gradprune.runtime.known import Known, planned_live
from gradprune.runtime.microbatch import Microbatch, Policy, tokens_of
from gradprune.runtime.proof_cache import proved_tape, shapes_of
from gradprune.runtime.proofs import Proof, ProofBook
from gradprune.runtime.runs import ObservedRun
from gradprune.runtime.tape import Tape
from gradprune.runtime.trust import Trust
from gradprune.schedule import Schedule

_REMEMBERED = 10_000

#: One in so many dead microbatches with a costly boundary has the cotangent there looked at.
SAMPLED = 16

#: So many programs that differ in numbers only (weights of a microbatch, say) are proved with those numbers left open.
ALIKE = 3


class Pruner:
    """Proofs, guard, FLOP account and decisions of one step or loop. name: for a reader. function: the user's code."""

    def __init__(self, function: Callable[..., Any], name: str, policy: Policy, schedule: Schedule) -> None:
        self.policy, self.schedule = policy, schedule
        self.book = ProofBook(function)
        self.guard = Guard(policy.on_violation, self._poison)
        self.meter = FlopMeter()
        self.parallel = DataParallel()
        self.trust = Trust(schedule.decides_together)
        self._name = name
        self._decisions: deque[tuple[int, Live | Dead | PlannedMicrobatch]] = deque(maxlen=_REMEMBERED)
        self._calls = self._pruned = 0
        self._warned = False
        self._alike: Counter[Any] = Counter()
        self._stages_may_prune = False
        self._listening: list[Arrivals] = []
        watch_optimizers()

    def explain(self) -> Explanation:
        decisions = (
            Decision(index, Live(planned_live(found)) if isinstance(found, PlannedMicrobatch) else found)
            for index, found in self._decisions
        )
        return Explanation(self._name, tuple(decisions), tuple(self.book.verdicts()))

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
        return Microbatch(self.next_index(), models, known, named, constants)

    def next_index(self) -> int:
        """The number of the microbatch that begins now."""
        self._calls += 1
        return self._calls - 1

    def agree(self, plan: StepPlan) -> StepPlan:
        self._settle_trials(wait=self.schedule.decides_together())
        proved = self.book.settled() and self.trust.settled()
        plan, self._stages_may_prune = self.schedule.agree(plan, proved)
        if self._stages_may_prune:
            self.trust.confirm()
        return plan

    def unproved_stage(self) -> Live | None:
        """Why a pipeline stage that computes no loss may not prune yet."""
        if self._stages_may_prune:
            return None
        return Live("the stage that computes the loss had no proof when ranks last agreed: step.agree(plan)")

    def way(self, microbatch: Microbatch) -> Live | Proof | None:
        """Live with its reason, a proof to run dead by, or None: observe it, then decide."""
        self.settle()
        forbidden = self.forbidden(microbatch)
        if forbidden is not None:
            return forbidden
        if (objection := self.trust.objection(microbatch.family)) is not None:
            return Live(objection)
        proof = self.book.expected(microbatch.family)
        if proof is not None and not proof.admission.admits({n: t.shape for n, t in microbatch.named.items()}):
            proof = None  # proved for other sizes: 1 is not like 2
        if proof is None and self.book.full():
            return Live("the step computed too many different things to prove each")
        if proof is not None and isinstance(proof.verdict, Refusal):
            return Live(f"not proved: {proof.verdict.reasons[0]}")
        if proof is not None and proof.against:
            return Live(proof.against[0])
        return proof

    def forbidden(self, microbatch: Microbatch) -> Live | None:
        """Why this microbatch runs live whatever was proved."""
        if not microbatch.known.holds:
            return Live(microbatch.known.reason)
        if not torch.is_grad_enabled():
            return Live("gradients are switched off")
        modules = [module for model in microbatch.models.values() for module in modules_of(model)]
        owned = (parameter for module in modules for parameter in module._parameters.values())
        if any(isinstance(parameter, UninitializedParameter) for parameter in owned):
            return Live("the model has parameters that its first forward makes")
        if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
            return Live("the model has a ScriptModule, whose calls cannot be watched")
        objection = self.schedule.objection(microbatch.known.plan)
        if objection is None:
            objection = self.parallel.objection(microbatch.models.values(), self.schedule.shields)
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

    def looks_at_boundary(self, proof: Proof) -> bool:
        """Whether the coming dead microbatch runs the loss's own backward: each one, unless it is costly and there is
        another way to see whether the proof's side conditions hold."""
        return not (proof.wide and proof.checks.complete) or self._pruned % SAMPLED == 0

    def prove(self, microbatch: Microbatch, run: ObservedRun, loss: torch.Tensor) -> Proof | Refusal:
        """The proof of what `run` computed, known or new; a Refusal where it cannot be put to the proof."""
        try:
            tape, tensors = run.tape(loss)
            if not any(leaf.role == "wrt" for leaf in tape.leaves):
                raise TraceError("the loss reaches nothing that the model returned with a gradient")
        except TraceError as error:
            where: Any = error.where
            return Refusal(self.policy.hypothesis, (), (Reason("untraceable", str(error), where),), self._name)
        try:
            found = self._known(microbatch, run, tape, tensors) or self._new(microbatch, run, tape, tensors, loss)
        except Exception as error:  # noqa: BLE001  no fault of the analysis may stop a training
            message = f"the analysis failed: {type(error).__name__}: {error}"
            return Refusal(self.policy.hypothesis, (), (Reason("untraceable", message),), self._name)
        self.book.saw(microbatch.family, *found)
        return found[1]

    def _known(
        self, microbatch: Microbatch, run: ObservedRun, tape: Tape, tensors: list[torch.Tensor]
    ) -> tuple[tuple[Any, ...], Proof] | None:
        """A program of the book that speaks of `tape`: itself, or one with numbers left open that is proved."""
        shapes = shapes_of(tape, tensors)
        for candidate in (tape, tape.opened()[0]):
            program = (microbatch.family, candidate.content(), run.functions_read())
            proof = self.book.known(program, shapes)
            if proof is not None and (proof.verdict or candidate is tape):
                return program, proof
        return None

    def _new(
        self, microbatch: Microbatch, run: ObservedRun, tape: Tape, tensors: list[torch.Tensor], loss: torch.Tensor
    ) -> tuple[tuple[Any, ...], Proof]:
        """The proof of a new program; where only numbers set it apart from others, of all such programs at once."""
        opened, numbers = tape.opened()
        alike = (microbatch.family, opened.content(), run.functions_read())
        self._alike[alike] += 1
        if numbers and self._alike[alike] == ALIKE:
            values = [torch.tensor(number, dtype=torch.float64) for number in numbers]
            verdict, admission = proved_tape(opened, [*tensors, *values], self._name, self.policy.hypothesis)
            if verdict:
                return alike, run.proof(verdict, opened, admission, loss)
        verdict, admission = proved_tape(tape, tensors, self._name, self.policy.hypothesis)
        program = (microbatch.family, tape.content(), run.functions_read())
        return program, run.proof(verdict, tape, admission, loss)

    def refused(self, refusal: Refusal, always: bool = False) -> None:
        """Warn of the first refusal: as long as nothing was proved, or `always`. Raises PruneError if strict."""
        if self.policy.strict:
            raise PruneError(f"strict: {refusal}")
        proved = not always and any(isinstance(verdict, Certificate) for verdict in self.book.verdicts())
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

    def hear(self, microbatch: Microbatch, arrivals: Arrivals, loss: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Audit a dead microbatch whose graph was left on by its own backward: each gradient must be zero. Returns what
        to call with gradients besides those of `arrivals`."""
        note = functools.partial(self.guard.note, "audit", microbatch.about)

        def heard(gradient: torch.Tensor) -> None:
            note(magnitude(gradient))

        self.listen(arrivals, loss, heard)
        self.note(microbatch, Dead(microbatch.known.reason), audited=True)
        return heard

    def reached(self, reach: Reach, proof: Proof) -> list[torch.Tensor]:
        """What an unpruned backward would accumulate into: a run's graph tells, unless it hides a part."""
        found = self.schedule.owners(reach.leaves)
        if not reach.hidden:
            return list(found)
        return list({id(tensor): tensor for tensor in (*found, *proof.parameters())}.values())

    def ended(self, microbatch: Microbatch) -> None:
        """No backward will come for the models of this microbatch."""
        for model in microbatch.models.values():
            self.schedule.ended(model)

    def try_out(
        self, microbatch: Microbatch, proof: Proof, reach: Reach, loss: torch.Tensor
    ) -> Callable[[torch.Tensor], None]:
        """Watch the coming backward of a microbatch that was proved dead and runs in full all the same. Returns what to
        call with gradients besides those of `reach`."""
        kept = {id(buffer) for model in microbatch.models.values() for buffer in self.schedule.kept_buffers(model)}
        buffers = [buffer for buffer in microbatch.buffers() if id(buffer) not in kept]
        return self.trust.try_out(microbatch.family, proof, reach, loss, buffers).heard

    def _settle_trials(self, wait: bool = False) -> None:
        if (objection := self.trust.settle(wait)) is not None:
            self.refused(
                Refusal(self.policy.hypothesis, (), (Reason("live-term", objection),), self._name), always=True
            )

    def settle(self) -> None:
        """See to what is left of microbatches before. Waits for nothing."""
        if self._listening or self.trust.tries:
            self._stop_listening()
            self._settle_trials()

    def _stop_listening(self) -> None:
        while self._listening:
            self._listening.pop().close()

    # Accounting ---------------------------------------------------------------------------------------------------

    def delivery(self, microbatch: Microbatch, reached: Iterable[torch.Tensor]) -> Delivery:
        report = functools.partial(self.guard.note, "boundary", microbatch.about)
        to_all = self.parallel.hears_all(microbatch.models.values())
        delivery = Delivery(reached, report, to_all=to_all)
        residue = microbatch.known.residue()
        if residue is not None:
            self.guard.note("stale", microbatch.about, residue)
            delivery.stands(residue)
        return delivery

    def note(self, microbatch: Microbatch, outcome: Live | Dead, audited: bool = False) -> None:
        self._decisions.append((microbatch.index, outcome))
        tokens, padding = microbatch.tokens(self.policy.hypothesis.factors)
        plan = microbatch.known.plan
        filler = plan is not None and plan.filler
        if outcome:
            self.meter.live(microbatch.shape, tokens, padding, filler=filler)
            self.parallel.ran_live(microbatch.models.values())
            return
        self._pruned += 1
        self.meter.dead(microbatch.shape, tokens, padding, backward=audited, filler=filler)

    def ran_as_planned(self, index: int, plan: PlannedMicrobatch, shape: BatchShape, slots: int) -> None:
        """Book a live microbatch that nothing had to be decided about."""
        self._decisions.append((index, plan))
        self.meter.live(shape, *tokens_of(plan, slots), filler=plan.filler)

    def _poison(self) -> None:
        for proof in self.book.proofs():
            for parameter in proof.parameters():
                gradient = getattr(parameter, "main_grad", None)
                gradient = parameter.grad if gradient is None else gradient
                if gradient is not None:
                    gradient.fill_(float("nan"))
