"""grpo_loop(): a decorator that rewrites the loop over microbatches of a training function, and nothing else of it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from gradprune.errors import NoEffectWarning, PruneError
from gradprune.explanation import Explanation
from gradprune.facts import Hypothesis, Reason, Refusal, SourceLine
from gradprune.flops import FlopReport
from gradprune.loop.factors import Factor, hypothesis_of, parse_factors
from gradprune.loop.names import bound_names, needed_names
from gradprune.loop.region import find_region
from gradprune.loop.rewrite import rewrite
from gradprune.loop.runtime import LoopNames, PrunedLoop
from gradprune.loop.source import LoopRefusal, Source, build_function, read_source
from gradprune.runtime.guard import OnViolation
from gradprune.runtime.microbatch import Policy
from gradprune.runtime.pruner import Pruner
from gradprune.schedule import no_schedule

F = TypeVar("F", bound=Callable[..., Any])


def grpo_loop(
    zero: str,
    *,
    audit: float = 0.0,
    on_violation: OnViolation = "poison",
    allow_sync: bool = False,
    strict: bool = False,
) -> Callable[[F], F]:
    """Decorate a function so that its loop over microbatches runs provably dead ones without a backward.

    The loop is the one whose body calls ``.backward()``, of a tensor or of an engine that is given one. zero: product
    of expressions over the names in that body, ``"batch['advantages'] * batch['mask']"``: the very tensors that the
    loss reads; a microbatch is dead where the product is zero at every position and the proof holds. They are read on
    the CPU; on a device, a plan speaks for them where the loop iterates over ``plan.bind(...)``.
    audit, on_violation, allow_sync, strict: as in `gradprune.compile`.

    The decorated function has four attributes more: ``gradprune_source`` (its rewritten text, or None), ``explain()``,
    ``report()`` and ``check()``, as those of a compiled step. A function that is not understood is returned as it is,
    with a NoEffectWarning that names the construct and its line, or, if strict, a PruneError.
    """
    if callable(zero):
        raise PruneError("grpo_loop was given a function: write @gradprune.grpo_loop(zero=\"batch['advantages']\")")
    policy = functools.partial(Policy, audit=audit, on_violation=on_violation, strict=strict)
    policy(Hypothesis(()))

    def decorate(function: Any) -> Any:
        if isinstance(function, staticmethod | classmethod):
            return type(function)(decorate(function.__func__))
        try:
            factors = parse_factors(zero)
            return _rewritten(read_source(function), factors, policy(hypothesis_of(factors)), allow_sync)
        except PruneError as error:
            if strict:
                raise
            return _unchanged(function, zero, error)

    return decorate


def _rewritten(source: Source, factors: tuple[Factor, ...], policy: Policy, allow_sync: bool) -> FunctionType:
    roots = frozenset().union(*(factor.roots for factor in factors))
    region = find_region(source, roots)
    target = [] if region.target_names == [] else [region.loop.target]  # type: ignore[union-attr]
    in_loop = frozenset(bound_names([*target, *region.loop.body]))
    needs = tuple(needed_names(region.statements))
    line, last = source.line(region.statements[0]), region.calls[-1].lineno
    changed = rewrite(source, region)
    names = LoopNames(needs, in_loop, changed.names.plan, f"lines {line.line} to {last}")
    state: dict[str, Any] = {}
    pruner = Pruner(functools.partial(source.function, state), source.function.__qualname__, policy, no_schedule)
    loop = PrunedLoop(pruner, factors, names, source.function.__globals__, state, allow_sync)
    function = build_function(source, changed.tree, {changed.names.runtime: loop})
    return _equipped(function, changed.text, loop.explain, loop.report, loop.check)


def _unchanged(function: Any, zero: Any, error: PruneError) -> Any:
    """The function itself, with a warning that says why."""
    where = error.where if isinstance(error, LoopRefusal) else None
    name = getattr(function, "__qualname__", type(function).__name__)
    if where is None and isinstance(function, FunctionType):
        code = function.__code__
        where = SourceLine(code.co_filename, code.co_firstlineno, function=name)
    place = f"   at {where}" if where else ""
    warnings.warn_explicit(
        f"{name} runs as it is: {error}{place}",
        NoEffectWarning,
        where.file if where else "<unknown>",
        where.line if where else 1,
    )
    if not isinstance(function, FunctionType):
        return function
    hypothesis = Hypothesis((str(zero),))
    refusal = Refusal(hypothesis, (), (Reason("untraceable", str(error), where),), name)
    return _equipped(function, None, lambda: Explanation(name, (), (refusal,)), FlopReport, lambda: None)


def _equipped(
    function: FunctionType,
    text: str | None,
    explain: Callable[[], Explanation],
    report: Callable[[], FlopReport],
    check: Callable[[], None],
) -> FunctionType:
    function.__dict__.update(gradprune_source=text, explain=explain, report=report, check=check)
    return function
