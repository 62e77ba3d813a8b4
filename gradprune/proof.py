"""prove(): from a loss or a whole step to a certificate, or to the lines through which gradient still flows."""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradprune.errors import PruneError, TraceError
from gradprune.facts import Certificate, Hypothesis, Reason, Refusal, SourceLine, Verdict
from gradprune.joint import JointGraph
from gradprune.passes.zero_flow import analyse
from gradprune.runtime.tape import Tape
from gradprune.trace import trace_joint
from gradprune.trace.admission import Admission
from gradprune.trees import leaves


def prove(
    loss_fn: Callable[..., Any],
    example_args: Sequence[Any] | Mapping[str, Any],
    *,
    zero: str | Hypothesis,
    wrt: str | Sequence[str],
    config: Mapping[str, Any] | None = None,
) -> Verdict:
    """Prove that every gradient of a loss is exactly zero where a product of its inputs is, or say why not.

    loss_fn: returns the scalar loss, or a tuple or mapping that starts with or holds it. It may also be a whole step
        ``(model, batch) -> loss``; nothing is computed on real data and the model is not changed.
    example_args: its arguments, by position or by parameter name: tensors of any size (the proof generalises over
        sizes where it can, see ``Certificate.symbolic``), nests of tensors, modules, configuration.
    zero: a product of names, ``"adv * mask"``: at every position at least one factor is zero. Names are parameters of
        `loss_fn`, or keys or attributes inside one.
    wrt: the parameters that depend on the model, one name or several; ``"parameters"`` for those of a module among
        the arguments.
    config: further keyword arguments.

    Returns a truthy Certificate or a falsy Refusal; printing either explains it. Raises PruneError for names that do
    not exist. What cannot be traced is a Refusal that names the line.
    """
    hypothesis = Hypothesis.parse(zero)
    call, names, values = _arguments(loss_fn, example_args)
    tensors = [name for name, value in zip(names, values) for name, _ in leaves(value, name)]
    for factor in hypothesis.factors:
        if _carrier(factor, tensors) is None:
            raise PruneError(f"zero names {factor!r}, which the loss does not take: it takes {', '.join(tensors)}")
    wanted = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    whole = wanted == ("parameters",)
    if whole:
        wanted = tuple(name for name, value in zip(names, values) if isinstance(value, torch.nn.Module))
        if not wanted:
            raise PruneError("wrt='parameters' needs a torch.nn.Module among the arguments: pass (model, batch)")
    program = Program(call, tuple(values), dict(config or {}), tuple(names), wanted, _name_of(loss_fn))
    verdict, _ = prove_program(program, hypothesis)
    if isinstance(verdict, Certificate):
        return replace(verdict, depth="step" if whole else "loss")
    return verdict


@dataclass(frozen=True)
class Program:
    """A callable with arguments to trace it on; `wrt` are names, or prefixes of names, of leaves of the arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...]
    wrt: tuple[str, ...]
    subject: str


def program_of(tape: Tape, tensors: Sequence[torch.Tensor], subject: str) -> Program:
    """The program that a tape holds; `tensors` are its leaves, real or fake, of any size."""
    names = tuple(leaf.name for leaf in tape.leaves)
    wrt = tuple(leaf.name for leaf in tape.leaves if leaf.role == "wrt")
    detached = tuple(tensor.detach() for tensor in tensors)
    return Program(lambda *args: tape.play(args), detached, {}, names, wrt, subject)


def prove_program(program: Program, hypothesis: Hypothesis) -> tuple[Verdict, Admission]:
    """The verdict on a program, and the sizes of its leaves for which it holds (all, where it could not be traced)."""
    start = time.perf_counter()
    tensors = [name for value, prefix in zip(program.args, program.names) for name, _ in leaves(value, prefix)]
    aligned = [name for factor in hypothesis.factors if (name := _carrier(factor, tensors)) is not None]
    try:
        with _frameworks():
            joints = trace_joint(
                program.function, program.args, program.kwargs, names=program.names, wrt=program.wrt, aligned=aligned
            )
    except TraceError as error:
        where = error.where if isinstance(error.where, SourceLine) else None
        reason = Reason("untraceable", f"not traceable: {error}", where)
        return _timed(Refusal(hypothesis, program.wrt, (reason,), program.subject), start), Admission(())
    names = [item.name for item in joints[0].inputs if item.role != "tangent"]
    factors = {factor: found for factor in hypothesis.factors if (found := _carrier(factor, names)) is not None}
    verdicts = [analyse(joint, factors, hypothesis=hypothesis, subject=program.subject) for joint in joints]
    verdict = _merged(verdicts, joints)
    if len(factors) < len(hypothesis.factors):
        verdict = _unread(program, hypothesis, factors, verdict)
    return _timed(verdict, start), Admission.of(joints)


def _frameworks() -> contextlib.AbstractContextManager[None]:
    """What frameworks that are in use need to be traced."""
    if "megatron.core.parallel_state" not in sys.modules:
        return contextlib.nullcontext()
    from gradprune.megatron.tracing import traceable

    return traceable()


def _merged(verdicts: Sequence[Verdict], joints: Sequence[JointGraph]) -> Verdict:
    """One verdict for all paths: proved only where each is."""
    refusals = [verdict for verdict in verdicts if isinstance(verdict, Refusal)]
    if refusals:
        return replace(refusals[0], reasons=_unique(reason for refusal in refusals for reason in refusal.reasons))
    proved = [verdict for verdict in verdicts if isinstance(verdict, Certificate)]
    return replace(
        proved[0],
        paths=len(proved),
        per_row=len(proved) == 1 and proved[0].per_row,  # a dead row's data may choose the path that the others take
        conditions=_unique(condition for verdict in proved for condition in verdict.conditions),
        operators=sum(verdict.operators for verdict in proved),
        unknown=_unique(name for verdict in proved for name in verdict.unknown),
        symbolic=tuple(name for name in joints[0].symbolic if all(name in joint.symbolic for joint in joints)),
    )


def _unique(items: Any) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(items))


def _timed(verdict: Verdict, start: float) -> Verdict:
    return replace(verdict, seconds=time.perf_counter() - start)


def _unread(program: Program, hypothesis: Hypothesis, factors: Mapping[str, str], verdict: Verdict) -> Refusal:
    """A program that reads only some factors knows less than the hypothesis says; `verdict` took those for zero."""
    missing = ", ".join(name for name in hypothesis.factors if name not in factors)
    reasons = verdict.reasons if isinstance(verdict, Refusal) else ()
    unread = Reason("lost-factor", f"the loss never reads {missing}: only where the rest is zero by itself is it dead")
    return Refusal(hypothesis, program.wrt, (*reasons, unread), program.subject)


def _carrier(factor: str, names: Sequence[str]) -> str | None:
    """The input that carries a factor: its very name, or the one name that ends in it; None where nothing does."""
    if factor in names:
        return factor
    ending = [name for name in names if name.endswith(f".{factor}")]
    if len(ending) > 1:
        raise PruneError(f"zero names {factor!r}, which is ambiguous: write one of {', '.join(ending)}")
    return ending[0] if ending else None


def _arguments(
    function: Callable[..., Any], example: Sequence[Any] | Mapping[str, Any]
) -> tuple[Callable[..., Any], list[str], list[Any]]:
    """`function` as one of positional arguments only, their names and their values."""
    if isinstance(example, torch.Tensor) or not isinstance(example, Sequence | Mapping):
        raise PruneError(f"example_args is a {type(example).__name__}: pass a tuple of arguments, or a dict by name")
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise PruneError(f"example_args does not fit {_name_of(function)}: {error}") from error
    except ValueError:  # a callable without a signature
        return _positional(function, len(args), list(kwargs)), _numbered(len(args)) + list(kwargs), [*args, *example]
    parameters = list(inspect.signature(function).parameters.values())
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [plain[i] if i < len(plain) else f"args[{i}]" for i in range(len(bound.args))]
    call = _positional(function, len(bound.args), list(bound.kwargs))
    return call, names + list(bound.kwargs), [*bound.args, *bound.kwargs.values()]


def _numbered(count: int) -> list[str]:
    return [f"args[{i}]" for i in range(count)]


def _positional(function: Callable[..., Any], count: int, keywords: list[str]) -> Callable[..., Any]:
    return lambda *values: function(*values[:count], **dict(zip(keywords, values[count:])))


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__name__)
