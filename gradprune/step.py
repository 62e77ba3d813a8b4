"""compile(): a training step that proves which of its microbatches have no gradient, and computes none for those."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gradprune.dead import Delivery, largest
from gradprune.errors import NoEffectWarning, PruneError, TraceError
from gradprune.explanation import Decision, Explanation
from gradprune.facts import Certificate, Dead, Hypothesis, Live, Reason, Refusal
from gradprune.flops import FlopReport
from gradprune.guard import Guard, OnViolation, magnitude, watch_optimizers
from gradprune.known import Known, examine
from gradprune.meter import FlopMeter
from gradprune.proof import program_of, prove_program
from gradprune.proofs import Proof, ProofBook
from gradprune.runs import DeadRun, ObservedRun, Rollback, batch_leaves, family
from gradprune.schedule import Schedule, no_schedule
from gradprune.trees import loss_of, map_tensors

_REMEMBERED = 10_000

Call = Callable[[], Any]


def compile(
    step: Callable[..., Any],
    *,
    zero: str | Hypothesis,
    audit: float = 0.0,
    on_violation: OnViolation = "poison",
    allow_sync: bool = False,
    strict: bool = False,
    schedule: Schedule = no_schedule,
) -> PrunedStep:
    """Wrap a training step so that provably dead microbatches run without a graph and without a backward.

    step: ``(model, batch, ...) -> loss``, or a tuple or mapping that starts with or holds the loss; or a Megatron
        ``forward_step(data_iterator, model, ...) -> (output_tensor, loss_func)``. The caller goes on to call
        ``loss.backward()`` on what it returns, for every microbatch.
    zero: product of names of tensors in the batch, ``"advantages * loss_mask"``; where it is zero at every position of
        a microbatch, and the proof holds, the microbatch is dead. Everything else runs as if it were not wrapped.
    audit: share of the dead microbatches, evenly spread and beginning with the first, whose whole backward is run and
        whose every gradient must be exactly zero.
    on_violation: a dead microbatch whose gradient would not have been finite makes the gradients NaN (``"poison"``),
        or raises ViolationError when the optimizer is about to step (``"raise"``: waits for the device there).
    allow_sync: read advantages that live on a device and have no plan, waiting for the device.
    strict: raise PruneError where a proof is refused, instead of running live with a NoEffectWarning.
    schedule: what a pipeline schedule needs of a pruned microbatch; see `gradprune.megatron.attach`.

    Raises PruneError for arguments that make no sense. Proofs are made at the first microbatch that could be dead.
    """
    if not callable(step):
        raise PruneError(f"step is a {type(step).__name__}: pass the training step, a callable")
    if not 0 <= audit <= 1:
        raise PruneError(f"audit is {audit}: pass a share between 0 and 1")
    if on_violation not in ("poison", "raise"):
        raise PruneError(f"on_violation is {on_violation!r}: pass 'poison' or 'raise'")
    return PrunedStep(step, Hypothesis.parse(zero), audit, on_violation, allow_sync, strict, schedule)


@dataclass
class _Microbatch:
    """One call in the making."""

    index: int
    model: torch.nn.Module
    batch: Any
    known: Known
    named: dict[str, torch.Tensor]
    family: tuple[Any, ...]
    counted: bool = False

    @property
    def about(self) -> str:
        place = f" (planned as {self.known.plan.index})" if self.known.plan else ""
        return f"microbatch {self.index}{place}"

    @property
    def shapes(self) -> tuple[Any, ...]:
        return self.family, tuple(tensor.shape for tensor in self.named.values())

    def tokens(self, factors: tuple[str, ...]) -> int:
        if self.known.plan and self.known.plan.tokens:
            return self.known.plan.tokens
        sizes = [tensor.numel() for name, tensor in self.named.items() if name.removeprefix("batch.") in factors]
        return max(sizes, default=0)


class PrunedStep:
    """The wrapped step; made by `compile`. Call it as the step itself."""

    def __init__(
        self,
        step: Callable[..., Any],
        hypothesis: Hypothesis,
        audit: float,
        on_violation: OnViolation,
        allow_sync: bool,
        strict: bool,
        schedule: Schedule,
    ) -> None:
        functools.update_wrapper(self, step, updated=())
        self._step, self._hypothesis = step, hypothesis
        self._audit, self._allow_sync, self._strict = audit, allow_sync, strict
        self._schedule = schedule
        self._name = str(getattr(step, "__qualname__", type(step).__name__))
        self._book = ProofBook(step)
        self._guard = Guard(on_violation, self._poison)
        self._meter = FlopMeter()
        self._decisions: deque[Decision] = deque(maxlen=_REMEMBERED)
        self._calls = self._pruned = 0
        self._warned = False
        watch_optimizers()

    def explain(self) -> Explanation:
        """What was decided for each microbatch so far, and why; printing it explains."""
        return Explanation(self._name, tuple(self._decisions), tuple(self._book.verdicts()))

    def report(self) -> FlopReport:
        """FLOPs run and pruned since the start."""
        return self._meter.report()

    def check(self) -> None:
        """Wait for the device and raise if a dead microbatch so far turns out not to have been dead."""
        self._guard.check()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._guard.poll()
        if len(args) > 1 and isinstance(args[1], torch.nn.Module) and not isinstance(args[0], torch.nn.Module):
            return self._forward_step(*args, **kwargs)
        if not args or not isinstance(args[0], torch.nn.Module) or len(args) + len(kwargs) < 2:
            raise PruneError(
                f"{self._name} was called with {', '.join(type(arg).__name__ for arg in args) or 'nothing'}: a "
                "compiled step takes (model, batch) or, for Megatron, (data_iterator, model)"
            )
        batch = args[1] if len(args) > 1 else next(iter(kwargs.values()))
        microbatch = self._microbatch(args[0], batch)
        return self._plain(microbatch, functools.partial(self._step, *args, **kwargs))

    # One call of a plain step -------------------------------------------------------------------------------------

    def _plain(self, microbatch: _Microbatch, call: Call) -> Any:
        way = self._way(microbatch)
        if isinstance(way, Live):
            return self._finish_live(microbatch, self._counted(microbatch, False, call), way)
        if way is None or self._audited():
            observed = ObservedRun(microbatch.model, microbatch.batch)
            output = self._counted(microbatch, False, functools.partial(observed.segment, call))
            return self._conclude(microbatch, observed, output)
        attempt = _Attempt(self, microbatch, way)
        output = self._counted(microbatch, True, functools.partial(attempt.run.segment, call))
        return attempt.finish(output, call)

    def _finish_live(self, microbatch: _Microbatch, output: Any, why: Live) -> Any:
        if microbatch.counted:
            self._meter.count_backward(microbatch.shapes, loss_of(output))
        self._note(microbatch, why)
        return output

    def _counted(self, microbatch: _Microbatch, dead: bool, call: Call) -> Any:
        microbatch.counted = self._meter.wants(microbatch.shapes, dead)
        if not microbatch.counted:
            return call()
        with self._meter.counting_forward(microbatch.shapes, dead):
            return call()

    # One call of a Megatron forward_step --------------------------------------------------------------------------

    def _forward_step(self, iterator: Any, model: torch.nn.Module, *rest: Any, **kwargs: Any) -> Any:
        if iterator is None:
            return self._step(iterator, model, *rest, **kwargs)
        batch = next(iterator)
        microbatch = self._microbatch(model, batch)

        def call() -> Any:
            return self._step(_Replay(batch, iterator), model, *rest, **kwargs)

        way = self._way(microbatch)
        if isinstance(way, Live):
            output, loss_func = self._counted(microbatch, False, call)
            return output, _then(loss_func, functools.partial(self._finish_live, microbatch, why=way))
        if way is None or self._audited():
            observed = ObservedRun(model, batch)
            output, loss_func = self._counted(microbatch, False, functools.partial(observed.segment, call))
            loss_in_segment = _within(observed.segment, loss_func)
            return output, _then(loss_in_segment, functools.partial(self._conclude, microbatch, observed))
        attempt = _Attempt(self, microbatch, way)
        output, loss_func = self._counted(microbatch, True, functools.partial(attempt.run.segment, call))

        def again() -> Any:
            live_output, live_loss = call()
            return live_loss(live_output)

        return output, _then(_within(attempt.run.segment, loss_func), functools.partial(attempt.finish, again=again))

    # Deciding -----------------------------------------------------------------------------------------------------

    def _microbatch(self, model: torch.nn.Module, batch: Any) -> _Microbatch:
        known = examine(batch, self._hypothesis, allow_sync=self._allow_sync)
        named = batch_leaves(batch)
        index, self._calls = self._calls, self._calls + 1
        return _Microbatch(index, model, batch, known, named, family(model, batch, named))

    def _way(self, microbatch: _Microbatch) -> Live | Proof | None:
        """Live with its reason, a proof to run dead by, or None: observe it, then decide."""
        if not microbatch.known.holds:
            return Live(microbatch.known.reason)
        if not torch.is_grad_enabled():
            return Live("gradients are switched off")
        objection = self._schedule.objection(microbatch.known.plan)
        if objection is not None:
            return Live(objection)
        if (reason := self._schedule.refusal()) is not None:
            self._refused(Refusal(self._hypothesis, (), (reason,), self._name))
            return Live(str(reason))
        proof = self._book.expected(microbatch.family)
        if proof is None and self._book.full():
            return Live("the step computed too many different things to prove each")
        if proof is not None and isinstance(proof.verdict, Refusal):
            return Live(f"not proved: {proof.verdict.reasons[0]}")
        return proof

    def _audited(self) -> bool:
        count = self._pruned
        return int(-(-(count + 1) * self._audit // 1)) > int(-(-count * self._audit // 1))

    def _conclude(self, microbatch: _Microbatch, run: ObservedRun, output: Any) -> Any:
        """Decide about a microbatch that ran live while it was recorded; cut it off from its graph if it is dead."""
        loss = loss_of(output)
        proof = self._prove(microbatch, run, loss)
        if isinstance(proof, Refusal) or isinstance(proof.verdict, Refusal):
            refusal = proof if isinstance(proof, Refusal) else proof.verdict
            assert isinstance(refusal, Refusal)
            self._refused(refusal)
            return self._finish_live(microbatch, output, Live(f"not proved: {refusal.reasons[0]}"))
        audited = self._audited()
        delivery = self._delivery(microbatch, proof)
        gradients = torch.autograd.grad(
            loss, [*run.boundary(), *(proof.parameters() if audited else ())], allow_unused=True
        )
        sizes = [torch.zeros(()) if gradient is None else magnitude(gradient) for gradient in gradients]
        for size in sizes[: len(run.boundary())]:
            delivery.see(size)
        if audited:
            self._guard.note("audit", microbatch.about, largest(sizes))
        self._note(microbatch, Dead(microbatch.known.reason), audited=audited)
        return _replaced(output, loss, delivery.detached(loss))

    def _prove(self, microbatch: _Microbatch, run: ObservedRun, loss: torch.Tensor) -> Proof | Refusal:
        try:
            tape, tensors = run.tape(loss)
        except TraceError as error:
            where: Any = error.where
            return Refusal(self._hypothesis, (), (Reason("untraceable", str(error), where),), self._name)
        program = (microbatch.family, tape.content())
        shapes = {leaf.name: tensor.shape for leaf, tensor in zip(tape.leaves, tensors)}
        proof = self._book.known(program, shapes)
        if proof is None:
            verdict, admission = prove_program(program_of(tape, tensors, self._name), self._hypothesis)
            proof = run.proof(verdict, tape, admission, loss)
        self._book.saw(microbatch.family, program, proof)
        return proof

    def _refused(self, refusal: Refusal) -> None:
        if self._strict:
            raise PruneError(f"strict: {refusal}")
        proved = any(isinstance(verdict, Certificate) for verdict in self._book.verdicts())
        if not self._warned and not proved:
            self._warned = True
            warnings.warn(f"{self._name} runs live: {refusal}", NoEffectWarning, stacklevel=4)

    # Accounting ---------------------------------------------------------------------------------------------------

    def _delivery(self, microbatch: _Microbatch, proof: Proof) -> Delivery:
        delivery = Delivery(proof.parameters(), functools.partial(self._guard.note, "boundary", microbatch.about))
        residue = microbatch.known.residue()
        if residue is not None:
            self._guard.note("stale", microbatch.about, residue)
            delivery.see(residue)
        return delivery

    def _note(self, microbatch: _Microbatch, outcome: Live | Dead, audited: bool = False) -> None:
        self._decisions.append(Decision(microbatch.index, outcome))
        tokens = microbatch.tokens(self._hypothesis.factors)
        if outcome:
            self._meter.live(microbatch.shapes, tokens)
            return
        self._pruned += 1
        plan = microbatch.known.plan
        self._meter.dead(microbatch.shapes, tokens, backward=audited, filler=bool(plan and plan.filler))

    def _poison(self) -> None:
        for proof in self._book.proofs():
            for parameter in proof.parameters():
                gradient = getattr(parameter, "main_grad", None)
                gradient = parameter.grad if gradient is None else gradient
                if gradient is not None:
                    gradient.fill_(float("nan"))


class _Attempt:
    """A dead run of one microbatch, which counts only if it made the calls that were proved."""

    def __init__(self, step: PrunedStep, microbatch: _Microbatch, proof: Proof) -> None:
        self._step, self._microbatch = step, microbatch
        self._delivery = step._delivery(microbatch, proof)
        self._rollback = Rollback(proof.written_buffers(), {tensor.device for tensor in microbatch.named.values()})
        inside = functools.partial(step._schedule.dead_forward, microbatch.model)
        self.run = DeadRun(proof, microbatch.named, self._delivery, inside)

    def finish(self, output: Any, again: Call) -> Any:
        """The output for the caller: of this run, or of a live one from the same state if this one was another step."""
        loss = loss_of(output)
        difference = self.run.difference(loss)
        if difference is not None:
            self._step._book.doubt(self._microbatch.family)
            self._rollback.restore()
            why = Live(f"the step does something else than what was proved: {difference}")
            return self._step._finish_live(self._microbatch, again(), why)
        self._step._note(self._microbatch, Dead(self._microbatch.known.reason))
        if loss.requires_grad:
            return output
        return _replaced(output, loss, self._delivery.detached(loss))


def _within(segment: Callable[[Call], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: segment(functools.partial(function, *args, **kwargs))


def _then(function: Callable[..., Any], after: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: after(function(*args, **kwargs))


class _Replay:
    """A data iterator that gives a batch that was already taken, and then goes on."""

    def __init__(self, batch: Any, rest: Iterator[Any]) -> None:
        self._first, self._rest = [batch], rest

    def __iter__(self) -> _Replay:
        return self

    def __next__(self) -> Any:
        return self._first.pop() if self._first else next(self._rest)


def _replaced(output: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    return map_tensors(output, lambda tensor: new if tensor is old else tensor)
