"""From the counted step of one microbatch to the backward of another that ran only its forward."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from gradprune.counting.tape import Operator, Tape
from gradprune.flops import Phases

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"})
"""Operators whose backward consists of products of the same cost, under whichever of these names."""


@dataclass(frozen=True)
class Cost:
    """FLOPs of the unpruned step of one microbatch. exact: counted, or concluded from counted steps without a guess."""

    phases: Phases
    exact: bool


def infer_cost(measured: Sequence[Tape], forward_only: Tape) -> Cost:
    """Cost of a step of which only the forward was counted, from whole steps of the same model that were.

    In this order: what the operators of a step with the same program did in its backward; the rules of differentiation,
    where they predicted each measured step; without either, an estimate.
    """
    for tape in measured:
        cost = transfer_cost(tape, forward_only.forward)
        if cost is not None:
            return cost
    if all(tape.derived() == tape.measured() for tape in measured):
        return Cost(forward_only.derived(), exact=bool(measured))
    return _keep_ratios(measured[0], forward_only.forward)


def transfer_cost(measured: Tape, forward: Sequence[Operator]) -> Cost | None:
    """Cost of a step whose `forward` is the same operators in the same order as in `measured`, at whatever shapes.

    Each operator inherits what its namesake's group did in the backward: operators of one group had equal cost in the
    measured step (the layers' equal projections, say). None where the programs differ, or where the operators of a
    group do not have equal cost in `forward`, so that it matters which of them was differentiated or recomputed.
    """
    if [op.name for op in measured.forward] != [op.name for op in forward]:
        return None
    backward = _inherit(measured.backward, measured.forward, forward, [_in_backward(op) for op in measured.forward])
    recompute = _inherit(measured.recompute, measured.forward, forward, [op.flops for op in measured.forward])
    if backward is None or recompute is None:
        return None
    return Cost(Phases(sum(op.flops for op in forward), backward, recompute), exact=True)


def _in_backward(op: Operator) -> int:
    """FLOPs of each operator that autograd runs for `op`: products come back as products, kernels as one kernel."""
    return op.flops if op.name in PRODUCTS else op.derived


def _inherit(
    ops: Sequence[Operator], before: Sequence[Operator], now: Sequence[Operator], traces: Sequence[int]
) -> int | None:
    """FLOPs of `ops` at the costs of `now`; ``before[i]`` shows itself in `ops` as a call of ``traces[i]`` FLOPs.

    None where a call belongs to no group, its group's operators differ in cost, or the group has no cost to scale.
    """
    if any(old.flops == 0 != new.flops for old, new in zip(before, now)):
        return None
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
    """An estimate: products and attention keep the ratios that they have in `measured`."""
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
