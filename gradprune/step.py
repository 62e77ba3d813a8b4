"""compile(): a training step that proves which of its microbatches have no gradient, and computes none for those."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradprune.errors import PruneError
from gradprune.explanation import Explanation
from gradprune.facts import Hypothesis, Reason, Refusal
from gradprune.flops import FlopReport
from gradprune.planner import StepPlan
from gradprune.planning.binding import BoundPlan
from gradprune.runtime.attempts import Run, start
from gradprune.runtime.batch import batch_constants, batch_leaves
from gradprune.runtime.compiled import CompiledRun, uses_compiled
from gradprune.runtime.guard import OnViolation
from gradprune.runtime.known import Known, examine
from gradprune.runtime.microbatch import Microbatch, Policy
from gradprune.runtime.pruner import Pruner
from gradprune.runtime.routine import Routine
from gradprune.runtime.stage_run import run_stage
from gradprune.schedule import Schedule, no_schedule

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
    """Wrap a training step so that provably dead microbatches keep no activations and have no backward.

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
    policy = Policy(Hypothesis.parse(zero), audit, on_violation, strict)
    return PrunedStep(step, policy, allow_sync, schedule)


class PrunedStep:
    """The wrapped step; made by `compile`. Call it as the step itself."""

    def __init__(self, step: Callable[..., Any], policy: Policy, allow_sync: bool, schedule: Schedule) -> None:
        functools.update_wrapper(self, step, updated=())
        self._step, self._allow_sync = step, allow_sync
        self._name = str(getattr(step, "__qualname__", type(step).__name__))
        self._pruner = Pruner(step, self._name, policy, schedule)

    @functools.cached_property
    def _compiled(self) -> bool:
        return uses_compiled(self._step)

    @functools.cached_property
    def _routine(self) -> Routine:
        return Routine(self._pruner, counts=not self._compiled)

    def explain(self) -> Explanation:
        """What was decided for each microbatch so far, and why; printing it explains."""
        return self._pruner.explain()

    def report(self) -> FlopReport:
        """FLOPs run and pruned since the start."""
        return self._pruner.report()

    def agree(self, plan: StepPlan) -> StepPlan:
        """`plan` as all ranks that share its collectives hold it: dead is what is dead for all of them.

        Call it once a rollout, on every rank, before the first forward, and bind the plan that it returns; without a
        `schedule` that spans ranks it is `plan` itself. Raises PlanError, on every rank, where ranks that see the same
        data hold different plans.
        """
        return self._pruner.agree(plan)

    def check(self) -> None:
        """Wait for the device and raise if a dead microbatch so far turns out not to have been dead."""
        self._pruner.guard.check()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._pruner.guard.poll()
        if len(args) > 1 and isinstance(args[1], torch.nn.Module) and not isinstance(args[0], torch.nn.Module):
            return self._forward_step(*args, **kwargs)
        if not args or not isinstance(args[0], torch.nn.Module) or len(args) + len(kwargs) < 2:
            raise PruneError(
                f"{self._name} was called with {', '.join(type(arg).__name__ for arg in args) or 'nothing'}: a "
                "compiled step takes (model, batch) or, for Megatron, (data_iterator, model)"
            )
        if not torch.is_grad_enabled():
            return self._step(*args, **kwargs)  # an evaluation, no microbatch of the training
        model, batch = args[0], args[1] if len(args) > 1 else next(iter(kwargs.values()))
        if (routine := self._routine.find(model, batch)) is not None:
            output = self._step(*args, **kwargs)
            self._routine.book(model, routine)
            return output
        call = functools.partial(self._step, *args, **kwargs)
        if self._compiled:
            return CompiledRun(self._pruner, self._microbatch(model, batch)).run(call)
        return _finish(start(self._pruner, self._microbatch(model, batch)), call)

    def _forward_step(self, iterator: Any, model: torch.nn.Module, *rest: Any, **kwargs: Any) -> Any:
        """One call of a Megatron ``forward_step``: its microbatch ends with the loss function that it returns."""
        if not self._pruner.schedule.computes_loss(model):
            stage = functools.partial(self._step, iterator, model, *rest, **kwargs)
            return run_stage(self._pruner, iterator, model, stage)
        if not torch.is_grad_enabled():
            return self._step(iterator, model, *rest, **kwargs)
        if not hasattr(iterator, "__next__"):
            self._refuse(iterator)
            return self._step(iterator, model, *rest, **kwargs)
        batch = next(iterator)
        if (routine := self._routine.find(model, batch)) is not None:
            found = self._step(_Replay(batch, iterator), model, *rest, **kwargs)
            self._routine.book(model, routine)
            return found
        microbatch = self._without_batch(iterator, model) if batch is None else self._microbatch(model, batch)
        run = start(self._pruner, microbatch)

        with run.segment():
            output, loss_func = self._step(_Replay(batch, iterator), model, *rest, **kwargs)

        def finishing_loss(*args: Any, **kwargs: Any) -> Any:
            call = functools.partial(loss_func, *args, **kwargs)
            if kwargs.get("non_loss_data"):  # as Megatron's schedules ask with collect_non_loss_data
                return _end_without_loss(run, call)
            return _finish(run, call)

        return output, finishing_loss

    def _refuse(self, iterator: Any) -> None:
        """Say that this step runs live since its batches cannot be read before it."""
        self._check_that_others_may_prune(iterator)
        if iterator is None:
            return
        why = (
            f"{type(iterator).__name__} has no __next__, and what the step is going to read of it is not known before: "
            "pass an iterator of batches"
        )
        reason = Reason("untraceable", why)
        self._pruner.refused(Refusal(self._pruner.policy.hypothesis, (), (reason,), self._name))

    def _without_batch(self, iterator: Any, model: torch.nn.Module) -> Microbatch:
        """A microbatch of a rank that gets its data from another one, while the step runs."""
        self._check_that_others_may_prune(None)
        planned = iterator.current if isinstance(iterator, BoundPlan) else None
        return self._pruner.microbatch({"": model}, Known(False, "this rank reads no batch", planned), {})

    def _check_that_others_may_prune(self, iterator: Any) -> None:
        if self._pruner.schedule.decides_together():
            what = "no data" if iterator is None else f"a {type(iterator).__name__}, which has no __next__"
            raise PruneError(
                f"{self._name} was given {what} on a rank that computes the loss, and ranks that share its collectives "
                "would wait for it where they prune: have every rank read the batches, or wrap the step on none"
            )

    def _microbatch(self, model: torch.nn.Module, batch: Any) -> Microbatch:
        known = examine(batch, self._pruner.policy.hypothesis, allow_sync=self._allow_sync)
        return self._pruner.microbatch({"": model}, known, batch_leaves(batch), batch_constants(batch))


def _finish(run: Run, call: Call) -> Any:
    """What a run finishes with that calls `call` last."""
    try:
        with run.segment():
            output = call()
        return run.finish(output)
    finally:
        run.release()


def _end_without_loss(run: Run, call: Call) -> Any:
    """What the caller wants instead of a loss, as it is."""
    try:
        return run.give_up(call(), "it is asked for something else than a loss")
    finally:
        run.release()


class _Replay:
    """A data iterator that gives a batch that was already taken, and then goes on."""

    def __init__(self, batch: Any, rest: Iterator[Any]) -> None:
        self._first, self._rest = [batch], rest

    def __iter__(self) -> _Replay:
        return self

    def __next__(self) -> Any:
        return self._first.pop() if self._first else next(self._rest)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._rest, name)
