"""What a rewritten loop calls at run time: decide about a microbatch from the names in scope, watch it, end it."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from gradprune.errors import PruneError, StalePlanError
from gradprune.explanation import Explanation
from gradprune.facts import Live, Reason, Refusal
from gradprune.flops import FlopReport
from gradprune.loop.factors import Factor
from gradprune.loop.scope import find_models, scalars, tensors
from gradprune.planner import PlannedMicrobatch, planned
from gradprune.runtime.attempts import LiveRun, Run, start
from gradprune.runtime.known import Known, judge
from gradprune.runtime.microbatch import Microbatch
from gradprune.runtime.modes import mode_depth
from gradprune.runtime.pruner import Pruner


@dataclass(frozen=True)
class LoopNames:
    """Names of a rewritten function. needs: of the region, see `loop_names`. in_loop: what the loop binds. plan: the
    variable that holds what is planned. place: the region, for a reader."""

    needs: tuple[str, ...]
    in_loop: frozenset[str]
    plan: str
    place: str


class PrunedLoop:
    """One decorated function: makes a `LoopMicrobatch` for each iteration. state: gets the Python values in reach."""

    locals = builtins.locals

    def __init__(
        self,
        pruner: Pruner,
        factors: tuple[Factor, ...],
        names: LoopNames,
        outside: dict[str, Any],
        state: dict[str, Any],
        allow_sync: bool,
    ) -> None:
        self.pruner, self.names = pruner, names
        self._factors, self._outside, self._state, self._allow_sync = factors, outside, state, allow_sync

    def explain(self) -> Explanation:
        return self.pruner.explain()

    def report(self) -> FlopReport:
        return self.pruner.report()

    def check(self) -> None:
        self.pruner.guard.check()

    def planned(self, *items: Any) -> PlannedMicrobatch | None:
        """What a bound plan says of the item of the loop, or of one of its parts."""
        return next((plan for item in items if (plan := planned(item)) is not None), None)

    def microbatch(self, scope: dict[str, Any]) -> LoopMicrobatch:
        """The microbatch of the iteration whose local names are `scope`."""
        self.pruner.guard.poll()
        plan = scope.get(self.names.plan)
        if plan is None:
            plan = self.planned(*(self._find(scope, name) for factor in self._factors for name in factor.roots))
        values = {name: value for name in self.names.needs if (value := self._find(scope, name)) is not _ABSENT}
        factors, problem = self._evaluate(scope)
        # Before Python 3.13 the frame keeps this dict, and with it the tensors of the last iteration.
        for name in self.names.in_loop:
            scope.pop(name, None)
        microbatch = self._describe(values, factors, plan, problem)
        return LoopMicrobatch(self, microbatch, self._start(microbatch, values), problem)

    def _find(self, scope: Mapping[str, Any], name: str) -> Any:
        return scope[name] if name in scope else self._outside.get(name, _ABSENT)

    def _evaluate(self, scope: dict[str, Any]) -> tuple[dict[str, torch.Tensor], str | None]:
        """The factors by name, or what is wrong with them."""
        found: dict[str, torch.Tensor] = {}
        for factor in self._factors:
            try:
                value = factor.value(scope, self._outside)
            except Exception as error:  # noqa: BLE001  the user's expression: whatever it raises is the reason
                return {}, f"zero: {factor.text} cannot be evaluated: {type(error).__name__}: {error}"
            if not isinstance(value, torch.Tensor):
                return {}, f"zero: {factor.text} is a {type(value).__name__}: name tensors that the loss reads"
            found[factor.name] = value
        return found, None

    def _describe(
        self,
        values: Mapping[str, Any],
        factors: dict[str, torch.Tensor],
        plan: PlannedMicrobatch | None,
        problem: str | None,
    ) -> Microbatch:
        known = self._know(factors, plan) if problem is None else Known(False, problem)
        in_loop = {name: value for name, value in values.items() if name in self.names.in_loop}
        named = {name: tensor for name, tensor in tensors(in_loop).items() if name not in factors}
        # The last name of a tensor counts: a factor that is part of the batch keeps the name in the hypothesis.
        return self.pruner.microbatch(find_models(values), known, {**named, **factors})

    def _start(self, microbatch: Microbatch, values: Mapping[str, Any]) -> Run:
        if microbatch.known.holds and not microbatch.models:
            why = "no module with trainable parameters is in reach of the names that this loop reads"
            self.refuse(why)
            return LiveRun(self.pruner, microbatch, Live(why))
        if microbatch.known.holds:
            steady = {name: value for name, value in values.items() if name not in self.names.in_loop}
            self._state.clear()
            self._state.update(scalars(steady))
        return start(self.pruner, microbatch)

    def _know(self, factors: dict[str, torch.Tensor], plan: PlannedMicrobatch | None) -> Known:
        try:
            return judge(factors, plan, allow_sync=self._allow_sync)
        except StalePlanError:
            raise
        except PruneError as error:
            return Known(False, str(error), plan)

    def refuse(self, why: str) -> None:
        """Warn that the loop runs live, and why; raise PruneError if strict."""
        self.pruner.refused(Refusal(self.pruner.policy.hypothesis, (), (Reason("untraceable", why),), self.names.place))


_ABSENT = object()


class LoopMicrobatch:
    """One pass over the region."""

    def __init__(self, loop: PrunedLoop, microbatch: Microbatch, run: Run, problem: str | None) -> None:
        self._loop, self._microbatch, self._problem = loop, microbatch, problem
        self._run: Run | None = run
        self._release: Any = run.release
        self._stack = ExitStack()

    def __enter__(self) -> LoopMicrobatch:
        assert self._run is not None
        self._stack.enter_context(self._run.segment())
        self._depth = mode_depth()
        return self

    def loss(self, value: Any) -> Any:
        """Called with each thing that may be the loss of a backward; returns what to call backward with."""
        if self._run is None or not isinstance(value, torch.Tensor):
            return value
        if self._problem is not None:
            self._loop.refuse(self._problem)
        if mode_depth() != self._depth:
            self._give_up("backward is called inside a torch mode that was entered after the forward")
        elif value.numel() != 1 or not value.requires_grad:
            self._give_up(f"backward starts at a tensor of shape {tuple(value.shape)} that is no loss with a gradient")
        else:
            run, self._run = self._run, None
            self._stack.close()
            return run.finish(value)
        return value

    def leave(self) -> None:
        """Called before the region is left by return, break or continue."""
        if self._run is not None:
            self._give_up("the body was left before its backward")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is None:
                self.leave()
        finally:
            self._run = None
            self._stack.__exit__(kind, error, trace)
            if self._release is not None:
                self._release()
                self._release = None

    def _give_up(self, why: str) -> None:
        """The region runs on as if it were not watched."""
        self._run = None
        self._loop.pruner.note(self._microbatch, Live(why))
