"""From the counted step of one microbatch to the backward of another that ran only its forward."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from gradprune.flop_tape import Operator, Tape
from gradprune.flops import Phases

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"})
"""Operators whose backward consists of products of the same cost, under whichever of these names."""


@dataclass(frozen=True)
class Cost:
    """FLOPs of the unpruned step of one microbatch. exact: counted, or derived by rules that leave no choice."""

    phases: Phases
    exact: bool


def same_program(first: Sequence[Operator], second: Sequence[Operator]) -> bool:
    """Whether two forwards are the same operators in the same order, at whatever shapes."""
    return len(first) == len(second) and all(a.name == b.name for a, b in zip(first, second))


def transfer_cost(measured: Tape, forward: Sequence[Operator]) -> Cost:
    """Cost of a step of which only `forward` ran, from a tape with forward and backward.

    Where both forwards are the same program, each operator inherits what its namesake's group did in the backward:
    operators of one group had equal cost in the measured step (the layers' equal projections, say). Exact as long as
    the group's operators still have equal cost in `forward`. Else each operator family keeps its ratio, an estimate.
    """
    if same_program(measured.forward, forward):
        backward = _inherit(measured.backward, measured.forward, forward, [_in_backward(op) for op in measured.forward])
        recompute = _inherit(measured.recompute, measured.forward, forward, [op.flops for op in measured.forward])
        if backward is not None and recompute is not None:
            return Cost(Phases(sum(op.flops for op in forward), backward, recompute), exact=True)
    return _keep_ratios(measured, forward)


def _in_backward(op: Operator) -> int:
    """FLOPs of each operator that autograd runs for `op`: products come back as products, kernels as one kernel."""
    return op.flops if op.name in PRODUCTS else op.derived


def _inherit(
    ops: Sequence[Operator], before: Sequence[Operator], now: Sequence[Operator], traces: Sequence[int]
) -> int | None:
    """FLOPs of `ops` at the costs of `now`; ``before[i]`` shows itself in `ops` as a call of ``traces[i]`` FLOPs.

    None where a call belongs to no group, or its group's operators differ in cost.
    """
    scaled = defaultdict(set)
    for old, new, trace in zip(before, now, traces):
        scaled[_family(old.name), trace].add(Fraction(new.flops * trace, old.flops) if old.flops else Fraction(0))
    total = Fraction(0)
    for (name, flops), times in Counter((op.name, op.flops) for op in ops).items():
        candidates = scaled.get((_family(name), flops), ())
        if len(candidates) != 1:
            return None
        total += times * next(iter(candidates))
    return int(total) if total.denominator == 1 else None


def _keep_ratios(measured: Tape, forward: Sequence[Operator]) -> Cost:
    before, now = _by_family(measured.forward), _by_family(forward)
    known = {family: flops for family, flops in before.items() if flops}
    totals = []
    for ops in (measured.backward, measured.recompute):
        spent = _by_family(ops)
        totals.append(sum(spent[family] * now[family] // flops for family, flops in known.items()))
    return Cost(Phases(sum(op.flops for op in forward), *totals), exact=False)


def _by_family(ops: Sequence[Operator]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for op in ops:
        totals[_family(op.name)] += op.flops
    return totals


def _family(name: str) -> str:
    return "product" if name in PRODUCTS else name.removesuffix("_backward")
