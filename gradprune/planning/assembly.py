"""Rollout -> items -> packs -> microbatches, optimizer step by optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradprune.errors import PlanError
from gradprune.planning.balance import Floats, Ints, lower_bound, tighten_bound
from gradprune.planning.binding import PlannedMicrobatch
from gradprune.planning.layout import Balance, lay_out
from gradprune.planning.limits import Bools, Items, Limits
from gradprune.planning.packing import GOOD_ENOUGH, pack_by_budget
from gradprune.planning.prepacked import pack_by_shape
from gradprune.planning.rollout import nearest_divisor, read_array, read_whole

Cost = Callable[[Ints], Floats]


@dataclass(frozen=True)
class Repacking:
    """What the loss says of moving sequences between microbatches. Raises PlanError where they must not move."""

    normaliser: str | None
    rows_coupled: bool
    tier: str

    def __post_init__(self) -> None:
        for name, allowed in (
            ("normaliser", (None, "global", "microbatch", "coupled")),
            ("tier", ("exact", "reordering")),
        ):
            if getattr(self, name) not in allowed:
                raise PlanError(
                    f"{name} is {getattr(self, name)!r}: pass one of {', '.join(repr(a) for a in allowed if a)}"
                )
        if self.rows_coupled or self.normaliser == "coupled":
            raise PlanError(
                "the loss couples rows, so another microbatch is another loss: keep the microbatches, with "
                "StepPlan.from_rollout(advantages, mask, microbatches)"
            )
        if self.normaliser == "microbatch" and self.tier == "exact":
            raise PlanError(
                "the loss divides by a number of its microbatch, so moving a sequence changes its weight: normalise by "
                "a number of the whole step, keep the microbatches with StepPlan.from_rollout, or accept it with "
                'tier="reordering"'
            )

    def notes(self) -> tuple[str, ...]:
        if self.normaliser == "global":
            return ()
        if self.normaliser is None:
            return ("nobody said what the loss divides by: taken for a number of the whole step (normaliser)",)
        return ("the loss divides by a number of its microbatch: this packing weighs sequences unlike another would",)


@dataclass(frozen=True)
class StepShare:
    """What a plan says of one optimizer step besides its microbatches."""

    dead_row_tokens: int
    balance: Balance


def assemble(
    lengths: Ints,
    dead: Bools,
    cost: Cost | None,
    limits: Limits,
    groups: Ints | None,
    steps: int | Sequence[int],
    product: str,
) -> tuple[tuple[tuple[PlannedMicrobatch, ...], ...], tuple[StepShare, ...]]:
    """The microbatches of every rank, step after step. groups [R]: numbered from 0 and kept whole, or None."""
    forward = _read_cost(cost, lengths)
    tokens = -(-lengths // limits.quantum) * limits.quantum
    sequences = Items(tokens, np.ones_like(lengths), tokens, forward, dead, lengths, np.arange(len(lengths)))
    step_of = _read_steps(steps, len(lengths), groups)
    plans, shares = [], []
    for step in range(int(step_of.max()) + 1):
        samples = np.flatnonzero(step_of == step)
        ranks, balance = _plan_step(
            sequences.take(samples), samples, limits, None if groups is None else groups[samples], product, step
        )
        plans.append(ranks)
        shares.append(StepShare(int(lengths[samples][dead[samples]].sum()), balance))
    joined = tuple(tuple(item for part in parts for item in part) for parts in zip(*plans))
    return joined, tuple(shares)


def _plan_step(
    sequences: Items, samples: Ints, limits: Limits, groups: Ints | None, product: str, step: int
) -> tuple[tuple[tuple[PlannedMicrobatch, ...], ...], Balance]:
    item_of, items = np.arange(len(sequences)), sequences
    if groups is not None:
        _, item_of = np.unique(groups, return_inverse=True)
        items = sequences.merge(item_of, int(item_of.max()) + 1, limits.padded)
    pack = pack_by_shape if limits.padded or limits.microbatch_size else pack_by_budget
    pack_of, rank = pack(items, limits)
    ranks, balance = lay_out(sequences, pack_of[item_of], rank, samples, limits, product, step)
    weights = items.cost * limits.passes(items.dead)
    bound = lower_bound(weights, limits.ranks)
    if balance.slowest > bound * GOOD_ENOUGH:
        bound = tighten_bound(weights, limits.ranks, bound, balance.slowest)
    return ranks, replace(balance, bound=bound)


def _read_cost(cost: Cost | None, lengths: Ints) -> Floats:
    if cost is None:
        return lengths.astype(np.float64)
    if not callable(cost):
        raise PlanError(f"cost is a {type(cost).__name__}: pass a callable, lengths -> forward FLOPs of each sequence")
    values = read_array("cost(lengths)", cost(lengths)).astype(np.float64)
    if values.shape != lengths.shape:
        raise PlanError(
            f"cost(lengths) has shape {list(values.shape)}: return one number a sequence, {len(lengths)} in all"
        )
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise PlanError(
            f"cost(lengths) is {values[row]} for sequence {row} of {lengths[row]} tokens: return FLOPs >= 0"
        )
    return values


def _read_step_numbers(steps: Sequence[int], rows: int) -> Ints:
    numbers = read_array("steps", steps)
    if numbers.shape != (rows,):
        raise PlanError(f"steps has shape {list(numbers.shape)}: pass one step a sequence, {rows}")
    wrong = ~((numbers >= 0) & (numbers < rows) & (numbers == np.floor(numbers)))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise PlanError(
            f"steps[{row}] is {numbers[row]}, for {rows} sequences: pass whole numbers from 0 on without a gap"
        )
    step_of = numbers.astype(np.int64)
    empty = np.flatnonzero(np.bincount(step_of) == 0)
    if empty.size:
        raise PlanError(f"no sequence is in step {empty[0]} of steps, one in a later: number them without a gap")
    return step_of


def _read_steps(steps: int | Sequence[int], rows: int, groups: Ints | None) -> Ints:
    if isinstance(steps, (int, float)) or getattr(steps, "ndim", 1) == 0:
        count = read_whole("steps", steps)
        if rows % count:
            raise PlanError(
                f"{rows} sequences do not split into {count} equal optimizer steps: pass steps="
                f"{nearest_divisor(rows, count)}, or the step of each sequence"
            )
        step_of = np.arange(rows) * count // rows
    else:
        step_of = _read_step_numbers(steps, rows)
    if groups is not None:
        lowest = np.full(int(groups.max()) + 1, rows)
        np.minimum.at(lowest, groups, step_of)
        torn = np.flatnonzero(lowest[groups] != step_of)
        if torn.size:
            raise PlanError(
                f"sequence {torn[0]} and its group fall into different optimizer steps, but groups are kept whole: "
                "pass steps that do not cut a group"
            )
    return step_of
