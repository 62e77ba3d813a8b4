"""Ranks decide together, on the CPU, once a rollout: same data, same plan; shared collectives, one decision.

Every rank tells all others what it holds, and each works out the same answer from that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from gradprune.errors import PlanError
from gradprune.planner import StepPlan
from gradprune.planning.binding import PlannedMicrobatch


@dataclass(frozen=True)
class Place:
    """Where a rank stands. data_rank: ranks with the same one see the same data. shares: the groups of ranks, this one
    among them, that have collectives in their backward."""

    data_rank: int
    shares: tuple[tuple[int, ...], ...]

    def of(self, plan: StepPlan) -> int:
        """Index into ``plan.ranks`` of this process."""
        return self.data_rank if len(plan.ranks) > 1 else 0


@dataclass(frozen=True)
class _Standing:
    """What one rank tells the others.

    data_rank, shares: of its Place. marks: one digest a microbatch of this data rank. proved: whether it prunes what
    its plan calls dead, or None where it computes no loss.
    """

    rank: int
    data_rank: int
    plan_ranks: int
    digest: str
    marks: tuple[bytes, ...]
    dead: tuple[bool, ...]
    shares: tuple[tuple[int, ...], ...]
    proved: bool | None


class Agreement:
    """A CPU group of all ranks. Making one is a collective; so is `close`."""

    def __init__(self, timeout: timedelta) -> None:
        on_cpu = not dist.is_initialized() or dist.get_backend() == "gloo"
        self._group = None if on_cpu else dist.new_group(backend="gloo", timeout=timeout)

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def settle(self, plan: StepPlan, place: Place, proved: bool | None) -> tuple[StepPlan, bool]:
        """The plan on which all ranks agree, and whether every rank that computes a loss for this one prunes it.

        Raises PlanError, on every rank, where ranks that see the same data hold different plans, or ranks that share
        collectives have different numbers of microbatches.
        """
        mine = _standing(plan, place, proved)
        everyone: list[_Standing | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self._group)
        standings = [standing for standing in everyone if standing is not None]
        _check_same_plans(standings)
        circles = _circles(standings)
        dead_in = {member.rank: flags for circle in circles for flags in [_dead_for_all(circle)] for member in circle}
        settled = plan
        for standing in standings if len(plan.ranks) > 1 else [mine]:
            settled = settled.agree(dead_in[standing.rank], standing.data_rank if len(plan.ranks) > 1 else 0)
        here = next(circle for circle in circles if any(member.rank == mine.rank for member in circle))
        return _with_note(plan, settled), all(member.proved is not False for member in here)


def _standing(plan: StepPlan, place: Place, proved: bool | None) -> _Standing:
    rank = place.of(plan)
    own = plan.ranks[rank] if rank < len(plan.ranks) else ()
    return _Standing(
        rank=dist.get_rank(),
        data_rank=place.data_rank,
        plan_ranks=len(plan.ranks),
        digest=plan.digest(),
        marks=tuple(map(_mark, own)),
        dead=tuple(item.dead for item in own),
        shares=place.shares,
        proved=proved,
    )


def _mark(item: PlannedMicrobatch) -> bytes:
    text = repr((item.step, item.index, item.dead, item.filler, item.tokens, item.samples))
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _check_same_plans(standings: Sequence[_Standing]) -> None:
    data_ranks = 1 + max(standing.data_rank for standing in standings)
    first_with: dict[int, _Standing] = {}
    for standing in standings:
        if standing.plan_ranks not in (1, data_ranks):
            raise PlanError(
                f"rank {standing.rank} holds a plan for {standing.plan_ranks} ranks, there are {data_ranks} "
                f"data-parallel ranks: plan for 1 or for {data_ranks}"
            )
        if standing.plan_ranks != standings[0].plan_ranks:
            raise PlanError(
                f"rank {standings[0].rank} holds a plan for {standings[0].plan_ranks} ranks and rank {standing.rank} "
                f"one for {standing.plan_ranks}: make the plan in the same way on all"
            )
        key = standing.data_rank if standing.plan_ranks == 1 else -1
        first = first_with.setdefault(key, standing)
        if first.digest != standing.digest:
            raise PlanError(_difference(first, standing))


def _difference(one: _Standing, other: _Standing) -> str:
    fix = "make the plan from the same rollout on both, or make it on one and broadcast it"
    if one.data_rank != other.data_rank:
        return f"ranks {one.rank} and {other.rank} hold different plans for all ranks: {fix}"
    head = f"ranks {one.rank} and {other.rank} see the same data and hold different plans: "
    if len(one.marks) != len(other.marks):
        return f"{head}{len(one.marks)} and {len(other.marks)} microbatches; {fix}"
    index = next((index for index, pair in enumerate(zip(one.marks, other.marks)) if pair[0] != pair[1]), None)
    if index is None:
        return f"{head}the microbatches are the same, the factors or those of other ranks are not; {fix}"
    words = [f"{'dead' if standing.dead[index] else 'live'} on {standing.rank}" for standing in (one, other)]
    return f"{head}the first difference is microbatch {index} ({', '.join(words)}); {fix}"


def _circles(standings: Sequence[_Standing]) -> list[list[_Standing]]:
    """Ranks joined by any chain of shared groups: what one of them prunes, all must prune."""
    leader = {standing.rank: standing.rank for standing in standings}

    def find(rank: int) -> int:
        while leader[rank] != rank:
            rank = leader[rank]
        return rank

    for standing in standings:
        for ranks in standing.shares:
            for rank in ranks:
                leader[find(rank)] = find(standing.rank)
    circles: dict[int, list[_Standing]] = {}
    for standing in standings:
        circles.setdefault(find(standing.rank), []).append(standing)
    return list(circles.values())


def _dead_for_all(circle: Sequence[_Standing]) -> list[bool]:
    first = circle[0]
    for member in circle:
        if len(member.dead) != len(first.dead):
            raise PlanError(
                f"ranks {first.rank} and {member.rank} share collectives in their backward and have {len(first.dead)} "
                f"and {len(member.dead)} microbatches: plan equal numbers, with fillers if need be"
            )
    return [all(flags) for flags in zip(*(member.dead for member in circle))]


def _with_note(before: StepPlan, after: StepPlan) -> StepPlan:
    turned = [
        new for old, new in zip(before.microbatches, after.microbatches, strict=True) if old.dead and not new.dead
    ]
    if not turned:
        return after
    tokens, dead = sum(item.tokens for item in turned), sum(item.dead for item in before.microbatches)
    note = (
        f"{len(turned)} of {dead} dead microbatches ({tokens} tokens) run live, because ranks with which they share "
        "collectives in the backward have them live"
    )
    return replace(after, notes=(*after.notes, note))
