"""StepPlan: which microbatch is dead and which sequence goes where. Made once a rollout, on the CPU, frozen."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any, Literal

import numpy as np

from gradprune.errors import PlanError
from gradprune.memory import ActivationMemory
from gradprune.planning.assembly import Cost, Repacking, StepShare, assemble
from gradprune.planning.binding import Batch, BoundPlan, PlannedMicrobatch, any_current, planned
from gradprune.planning.layout import Balance
from gradprune.planning.limits import Limits
from gradprune.planning.rollout import (
    UniformGroup,
    read_array,
    read_groups,
    read_lengths,
    read_whole,
    split_rows,
    uniform_groups,
    zero_rows,
)

__all__ = ["BoundPlan", "PlannedMicrobatch", "StepPlan", "any_current", "planned"]


@dataclass(frozen=True)
class StepPlan:
    """Microbatches of every rank, in running order; frozen, hashable, picklable.

    ranks: ``ranks[r]`` are the microbatches of data-parallel rank r. factors: names of the product that is zero where
    a row is dead. dead_row_tokens: tokens of dead rows, wherever they stand; `dead_tokens` of them were put together.
    shares: of each optimizer step its part of dead_row_tokens and of `balance`; see `steps`.
    """

    ranks: tuple[tuple[PlannedMicrobatch, ...], ...]
    factors: tuple[str, ...] = ("advantages",)
    dead_row_tokens: int = 0
    uniform: tuple[UniformGroup, ...] = ()
    notes: tuple[str, ...] = ()
    balance: Balance | None = field(default=None, compare=False)
    shares: tuple[StepShare, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def from_rollout(
        cls,
        advantages: Any,
        mask: Any,
        microbatches: int | Sequence[Any],
        *,
        lengths: Any = None,
        group_size: int | None = None,
        rewards: Any = None,
    ) -> StepPlan:
        """The plan of one rank for microbatches that exist already: which of them are dead.

        advantages: [R], [R, T], or packed [N] (with `lengths` [R], else each token is a row), on the CPU. mask: None,
        or of the same rows. microbatches: rows a microbatch, or the number of rows of each, or the row indices of
        each; every row in exactly one. group_size (with `rewards` [R] where there are some): lists groups of equal
        rewards whose advantage is a rounding residue, in `uniform`.

        Raises PlanError, naming row and bound, for data on a device, NaN or infinity, and shapes that do not fit.
        """
        factors = {"advantages": advantages} if mask is None else {"advantages": advantages, "mask": mask}
        plan = cls.from_factors(factors, microbatches, lengths=lengths)
        if group_size is None:
            return plan
        rows = sum(len(item.samples) for item in plan.ranks[0])
        return replace(
            plan, uniform=_find_uniform(advantages, _find_groups(rows, group_size, None, True), rewards, False)
        )

    @classmethod
    def from_factors(
        cls, factors: Mapping[str, Any], microbatches: int | Sequence[Any], *, lengths: Any = None
    ) -> StepPlan:
        """`from_rollout` for any product of factors: a microbatch is dead where at every position one is zero."""
        known = None if lengths is None else read_lengths(lengths)
        dead = zero_rows(factors, known)
        rows = len(dead)
        width = max(array.size // max(len(array), 1) for array in (read_array(*item) for item in factors.items()))
        tokens = np.full(rows, width) if known is None else known
        names = tuple(factors)
        planned_here = []
        for index, samples in enumerate(split_rows(rows, microbatches)):
            reason = _reason(names, dead, samples)
            count = int(tokens[samples].sum())
            is_dead = bool(dead[samples].all())
            planned_here.append(PlannedMicrobatch(index, is_dead, reason, tuple(samples.tolist()), count, float(count)))
        return cls((tuple(planned_here),), names, int(tokens[dead].sum()))

    @classmethod
    def build(
        cls,
        lengths: Any,
        advantages: Any,
        mask: Any = None,
        *,
        token_budget: int | None,
        ranks: int,
        cost: Cost | None = None,
        group_size: int | None = None,
        groups: Any = None,
        keep_groups: bool = False,
        rewards: Any = None,
        snap_uniform: bool = False,
        steps: int | Sequence[int] = 1,
        memory: ActivationMemory | None = None,
        normaliser: Literal["global", "microbatch", "coupled"] | None = None,
        rows_coupled: bool = False,
        tier: Literal["exact", "reordering"] = "exact",
        **limits: Any,
    ) -> StepPlan:
        """Packs the sequences of all ranks into microbatches, dead and live apart, for the fastest slowest rank.

        lengths [R]: tokens of each sequence. advantages: [R], [R, T] or packed [sum(lengths)]; mask alike. cost:
        lengths [R] -> forward FLOPs of each sequence; by default its tokens. limits: the other fields of `Limits`, such
        as ``num_microbatches=8, lockstep=True``. memory: derives dead_token_budget where that is not passed.

        group_size or groups [R] (an id a row), and rewards [R]: report groups of equal rewards whose advantages are
        not zero; snap_uniform takes those as zeros (see `snap`). keep_groups: a group stays in one microbatch.
        steps: optimizer steps that the rollout is used for, as many equal slices, or the step [R] of each sequence.

        normaliser: what the loss does, as `probe.probe_normaliser` says it; rows_coupled=True is the same as
        ``"coupled"``; None is taken for ``"global"``, and `notes` say so. A loss that couples rows is never re-packed;
        one that divides by a number of its microbatch only with ``tier="reordering"``, as another weighting.

        Where there are fewer sequences than ranks, the others get a one-token dead filler. Raises PlanError.
        """
        notes = Repacking(normaliser, rows_coupled, tier).notes()
        rules = _with_memory(Limits(ranks=ranks, token_budget=token_budget, **limits), memory)
        known = read_lengths(lengths)
        factors = {"advantages": advantages} if mask is None else {"advantages": advantages, "mask": mask}
        dead = zero_rows(factors, known)
        found = _find_groups(len(dead), group_size, groups, keep_groups or snap_uniform or rewards is not None)
        uniform = _find_uniform(advantages, found, rewards, snap_uniform)
        if snap_uniform:
            dead[[row for group in uniform for row in group.rows]] = True
        kept = found[0] if keep_groups and found else None
        rows, shares = assemble(known, dead, cost, rules, kept, steps, " * ".join(factors))
        balance, notes = reduce(add, (share.balance for share in shares)), (*notes, *_snap_note(uniform))
        return cls(rows, tuple(factors), int(known[dead].sum()), uniform, notes, balance, shares)

    @property
    def steps(self) -> tuple[StepPlan, ...]:
        """One plan an optimizer step: what to bind where each step has data of its own."""
        if len(self.shares) < 2:
            return (self,)
        return tuple(self._step(number, share) for number, share in enumerate(self.shares))

    def _step(self, number: int, share: StepShare) -> StepPlan:
        ranks = tuple(tuple(item for item in rank if item.step == number) for rank in self.ranks)
        rows = {row for rank in ranks for item in rank for row in item.samples}
        uniform = tuple(group for group in self.uniform if not rows.isdisjoint(group.rows))
        return StepPlan(ranks, self.factors, share.dead_row_tokens, uniform, self.notes, share.balance, (share,))

    def snap(self, advantages: Any) -> Any:
        """A copy of `advantages` where the groups that this plan snapped are exact zeros: what the loss must get."""
        snapped = advantages.clone() if hasattr(advantages, "clone") else np.array(advantages)
        for group in self.uniform:
            if group.snapped:
                snapped[list(group.rows)] = 0
        return snapped

    def bind(self, batches: Iterable[Batch] | None, rank: int | None = None) -> BoundPlan[Batch]:
        """One pass over the batches of `rank`, which may be left out where the plan has one rank.

        batches: a sequence, whose length must be the plan's, or an iterator, of which exactly that many are taken;
        None (a rank that gets its data from another) yields None for each. Bind what reaches the step:
        ``plan.bind(map(to_device, batches))``. For a virtual pipeline, bind each chunk's iterator.
        """
        if rank is None and len(self.ranks) != 1:
            raise PlanError(f"the plan has {len(self.ranks)} ranks: pass rank=, the data-parallel rank of this process")
        if not 0 <= (rank or 0) < len(self.ranks):
            raise PlanError(f"rank is {rank}, the plan has {len(self.ranks)} ranks: pass 0 to {len(self.ranks) - 1}")
        return BoundPlan(self.ranks[rank or 0], batches)

    def agree(self, dead: Sequence[bool], rank: int = 0) -> StepPlan:
        """The plan where microbatch i of `rank` stays dead only if ``dead[i]`` too: flags all-reduced over a group.

        Raises PlanError unless there is one flag a microbatch.
        """
        mine = self.ranks[rank]
        if len(dead) != len(mine):
            raise PlanError(
                f"agree was given {len(dead)} flags, rank {rank} has {len(mine)} microbatches: pass one each"
            )
        kept = tuple(
            replace(item, dead=False, reason="dead here, live on another rank of the group")
            if item.dead and not flag
            else item
            for item, flag in zip(mine, dead)
        )
        return replace(self, ranks=(*self.ranks[:rank], kept, *self.ranks[rank + 1 :]))

    @property
    def microbatches(self) -> tuple[PlannedMicrobatch, ...]:
        """Of all ranks, rank after rank."""
        return tuple(item for rank in self.ranks for item in rank)

    @property
    def tokens(self) -> int:
        return sum(item.tokens for item in self.microbatches)

    @property
    def dead_tokens(self) -> int:
        """Tokens in dead microbatches: those whose backward is pruned."""
        return sum(item.tokens for item in self.microbatches if item.dead)

    def digest(self) -> str:
        """64 hexadecimal digits, the same on any machine; equal where ranks, order, samples and dead flags are."""
        heads = [len(self.ranks)]
        samples: list[int] = []
        for rank in self.ranks:
            heads.append(len(rank))
            for item in rank:
                heads += [item.step, item.index, item.dead, item.filler, item.tokens, len(item.samples)]
                samples.extend(item.samples)
        text = b"gradprune plan 1\0" + "\0".join(self.factors).encode()
        numbers = np.asarray(heads + samples, dtype="<i8").tobytes()
        return hashlib.sha256(text + b"\0" + numbers).hexdigest()

    def __str__(self) -> str:
        dead = sum(item.dead for item in self.microbatches)
        share = self.dead_tokens / max(self.tokens, 1)
        lines = [
            f"plan {self.digest()[:12]}: {len(self.microbatches)} microbatches on {len(self.ranks)} "
            f"rank{'s' * (len(self.ranks) != 1)}, {dead} dead ({' * '.join(self.factors)} == 0)",
            f"  {self.dead_tokens} of {self.tokens} tokens in dead microbatches ({share:.1%}); "
            f"{self.dead_row_tokens} belong to dead rows",
        ]
        lines += [f"  {self.balance}"] if self.balance else []
        lines += [f"  note: {note}" for note in self.notes] + [f"  residue: {group}" for group in self.uniform]
        lines.append(f"  {'rank':>4} {'index':>5} {'':4} {'rows':>6} {'tokens':>8}  why")
        lines += [
            f"  {rank:>4} {item.index:>5} {'dead' if item.dead else 'live'} {len(item.samples):>6} {item.tokens:>8}  "
            f"{item.reason}"
            for rank, item in _head((rank, item) for rank, items in enumerate(self.ranks) for item in items)
        ]
        hidden = len(self.microbatches) - _SHOWN
        return "\n".join(lines + ([f"  ... and {hidden} more"] if hidden > 0 else []))


_SHOWN = 64


def _head(rows: Iterable[tuple[int, PlannedMicrobatch]]) -> list[tuple[int, PlannedMicrobatch]]:
    return [row for row, _ in zip(rows, range(_SHOWN))]


def _with_memory(rules: Limits, memory: ActivationMemory | None) -> Limits:
    if memory is None or rules.token_budget is None or rules.dead_token_budget is not None:
        return rules
    return replace(rules, dead_token_budget=memory.dead_token_budget(rules.token_budget))


_Groups = tuple[np.ndarray, tuple[int | str, ...]]


def _find_groups(rows: int, group_size: int | None, groups: Any, needed: bool) -> _Groups | None:
    if group_size is not None and groups is not None:
        raise PlanError("both group_size and groups were passed: pass one of them")
    found = read_groups(rows, groups if group_size is None else read_whole("group_size", group_size))
    if found is None and needed:
        raise PlanError("keep_groups, snap_uniform and rewards need groups: pass group_size, or groups, one id a row")
    return found


def _find_uniform(advantages: Any, groups: _Groups | None, rewards: Any, snap: bool) -> tuple[UniformGroup, ...]:
    if groups is None:
        return ()
    values, rows = read_array("advantages", advantages), len(groups[0])
    if len(values) != rows:  # packed: rows have no one value to compare
        if snap or rewards is not None:
            raise PlanError(f"uniform groups need one row of advantages a sequence, {rows}: pass them as [R] or [R, T]")
        return ()
    return tuple(replace(group, snapped=snap) for group in uniform_groups(values, groups, rewards))


def _snap_note(uniform: tuple[UniformGroup, ...]) -> tuple[str, ...]:
    snapped = [group.residue for group in uniform if group.snapped]
    if not snapped:
        return ()
    return (
        f"{len(snapped)} uniform groups are taken as exact zeros: give the loss plan.snap(advantages). This changes "
        f"the gradient: residues up to {max(snapped):.3g} no longer train",
    )


def _reason(names: tuple[str, ...], dead: np.ndarray, samples: np.ndarray) -> str:
    product = " * ".join(names)
    if not len(samples):
        return "no rows"
    if dead[samples].all():
        return f"{product} == 0 in all {len(samples)} rows"
    return f"{product} != 0 in row {samples[np.argmin(dead[samples])]}"
