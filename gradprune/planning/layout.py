"""Packs -> the microbatches of every rank in running order: dead first, live last, fillers, lockstep."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from gradprune.planning.balance import Ints
from gradprune.planning.binding import PlannedMicrobatch
from gradprune.planning.limits import Bools, Items, Limits


@dataclass(frozen=True)
class Balance:
    """Time of a plan, in the unit of the cost function, summed over its optimizer steps. A backward is two forwards.

    slowest: of the rank with the most work. bound: no plan has a faster slowest rank. mean: over ranks. waiting: the
    time of a step where ranks meet at every microbatch; equals `slowest` without lockstep. unpruned: `slowest` if the
    same plan ran unpruned.
    """

    slowest: float = 0.0
    bound: float = 0.0
    mean: float = 0.0
    waiting: float = 0.0
    unpruned: float = 0.0
    fillers: int = 0
    kept_live: int = 0

    def __add__(self, other: Balance) -> Balance:
        return Balance(**{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)})

    def __str__(self) -> str:
        ratio = self.slowest / self.bound if self.bound else 1.0
        text = (
            f"slowest rank {ratio:.4f} of the lower bound, {self.slowest / max(self.unpruned, 1e-300):.1%} of unpruned"
        )
        if self.waiting != self.slowest:
            text += f"; lockstep: {self.waiting / self.slowest - 1:.1%} waiting" if self.slowest else ""
        text += f"; {self.fillers} fillers" if self.fillers else ""
        return text + (f"; {self.kept_live} dead microbatches kept live for lockstep" if self.kept_live else "")


def lay_out(
    sequences: Items, pack_of: Ints, rank: Ints, samples: Ints, limits: Limits, product: str, step: int = 0
) -> tuple[tuple[tuple[PlannedMicrobatch, ...], ...], Balance]:
    """The microbatches of every rank in running order, and their balance (its `bound` is left 0).

    sequences: one item each; pack_of [sequences]; rank [packs]; samples [sequences]: their indices in the rollout.

    On a rank: dead microbatches, cheapest first, then live ones, cheapest first, fillers before those of their kind. In
    lockstep every rank has as many dead and as many live ones as the rank with most; the smallest dead packs run live
    where no dead index is left for them.
    """
    packs = sequences.merge(pack_of, len(rank), limits.padded)
    count = np.bincount(rank, minlength=limits.ranks)
    dead = np.bincount(rank, packs.dead, limits.ranks).astype(np.int64)
    slots_dead, slots = _slots(dead, count - dead, limits)
    run_dead = np.minimum(dead, slots_dead)
    runs_dead = packs.dead if (dead <= slots_dead).all() else _largest_dead(packs, rank, count, run_dead)
    order = np.lexsort((packs.cost, ~runs_dead, rank))
    early = runs_dead[order]
    base = np.cumsum(slots) - slots
    place = np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)
    slot = np.repeat(base, count) + place + np.repeat(slots_dead - run_dead, count)
    slot[~early] += np.repeat(slots - slots_dead - (count - run_dead), count)[~early]
    pack_in = np.full(int(slots.sum()), -1)
    pack_in[slot] = order
    is_dead = np.arange(len(pack_in)) - np.repeat(base, slots) < np.repeat(slots_dead, slots)
    ranks = _write(sequences, packs, pack_of, samples, pack_in, is_dead, slots, limits.quantum, product, step)
    return ranks, _measure(packs, pack_in, is_dead, slots, limits)


def _largest_dead(packs: Items, rank: Ints, count: Ints, run_dead: Ints) -> Bools:
    """Which packs run dead: of each rank as many as `run_dead`, those with most tokens."""
    order = np.lexsort((-packs.tokens, ~packs.dead, rank))
    place = np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)
    chosen = np.zeros(len(order), dtype=np.bool_)
    chosen[order] = place < np.repeat(run_dead, count)
    return chosen


def _slots(dead: Ints, live: Ints, limits: Limits) -> tuple[Ints, Ints]:
    """Indices of each rank that run dead, and all its indices."""
    if limits.lockstep:
        dead, live = np.full_like(dead, dead.max()), np.full_like(live, live.max())
    total = dead + live
    if limits.num_microbatches is not None:
        wanted = np.full_like(total, limits.num_microbatches)
    else:
        wanted = np.maximum(total, 1) + -np.maximum(total, 1) % limits.multiple_of
    return wanted - live, wanted


def _measure(packs: Items, pack_in: Ints, is_dead: Bools, slots: Ints, limits: Limits) -> Balance:
    filled = pack_in >= 0
    cost = np.where(filled, packs.cost[pack_in], 0.0)
    time = cost * limits.passes(is_dead)
    owner = np.repeat(np.arange(limits.ranks), slots)
    loads = np.bincount(owner, time, limits.ranks)
    waiting = time.reshape(limits.ranks, -1).max(axis=0).sum() if limits.lockstep else loads.max()
    unpruned = np.bincount(owner, cost * limits.passes(False), limits.ranks).max()
    kept = int(np.count_nonzero(packs.dead[pack_in] & filled & ~is_dead))
    fillers = int(np.count_nonzero(~filled))
    return Balance(float(loads.max()), 0.0, float(loads.mean()), float(waiting), float(unpruned), fillers, kept)


def _write(
    sequences: Items,
    packs: Items,
    pack_of: Ints,
    samples: Ints,
    pack_in: Ints,
    is_dead: Bools,
    slots: Ints,
    filler_tokens: int,
    product: str,
    step: int,
) -> tuple[tuple[PlannedMicrobatch, ...], ...]:
    members = np.lexsort((samples, pack_of))
    start = np.searchsorted(pack_of[members], np.arange(len(packs) + 1))
    witness = np.minimum.reduceat(
        np.where(sequences.dead, np.iinfo(np.int64).max, samples)[members], start[:-1]
    ).tolist()
    listed, cuts = samples[members].tolist(), start.tolist()
    tokens, cost, all_dead = packs.tokens.tolist(), packs.cost.tolist(), packs.dead.tolist()
    padding = (packs.tokens - packs.real).tolist()
    ranks = []
    at = 0
    for size in slots.tolist():
        row = []
        for index, (pack, dead) in enumerate(zip(pack_in[at : at + size].tolist(), is_dead[at : at + size].tolist())):
            if pack < 0:
                reason = "filler" if dead else "filler at an index that is live on another rank"
                row.append(PlannedMicrobatch(index, dead, reason, (), filler_tokens, 0.0, step, True, filler_tokens))
                continue
            if dead:
                reason = f"{product} == 0 in all {cuts[pack + 1] - cuts[pack]} rows"
            elif all_dead[pack]:
                reason = "dead here, at an index that is live on another rank"
            else:
                reason = f"{product} != 0 in row {witness[pack]}"
            mine = tuple(listed[cuts[pack] : cuts[pack + 1]])
            row.append(
                PlannedMicrobatch(index, dead, reason, mine, tokens[pack], cost[pack], step, False, padding[pack])
            )
        ranks.append(tuple(row))
        at += size
    return tuple(ranks)
