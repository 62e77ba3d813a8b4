"""One yardstick for every planner: the time of its slowest rank once the backwards of dead microbatches are pruned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LIVE, DEAD = 3.0, 1.0  # forwards: a backward is two


@dataclass(frozen=True)
class Score:
    """found: tokens of dead sequences that stand in dead microbatches, of all tokens of dead sequences. slowest: rank,
    pruned, over the lower bound. saved: 1 - slowest rank / a perfectly level unpruned step; `possible` is the most.
    lockstep: as saved, where ranks meet at every microbatch and it is dead only if it is on all."""

    found: float
    slowest: float
    saved: float
    possible: float
    lockstep: float
    packs: int
    largest: int


def bound(weights: np.ndarray, ranks: int) -> float:
    """max(mean load, heaviest item, and for each k the k + 1 lightest of the k * ranks + 1 heaviest items)."""
    heavy = np.sort(weights)[::-1]
    sums = np.concatenate([[0.0], np.cumsum(heavy)])
    last = np.arange(0, len(heavy), ranks)
    return float(max(sums[-1] / ranks, (sums[last + 1] - sums[last - np.arange(len(last))]).max()))


def score(
    lengths: np.ndarray, dead: np.ndarray, flops: np.ndarray, ranks: int, pack_of: np.ndarray, rank: np.ndarray
) -> Score:
    """Scores a plan given as pack of each sequence and rank of each pack; dead packs run first on each rank."""
    packs = len(rank)
    live_in = np.bincount(pack_of, ~dead, packs) > 0
    cost = np.bincount(pack_of, flops, packs)
    time = cost * np.where(live_in, LIVE, DEAD)
    slowest = np.bincount(rank, time, ranks).max()
    level, best = bound(flops * LIVE, ranks), bound(flops * np.where(dead, DEAD, LIVE), ranks)
    found = lengths[dead & ~live_in[pack_of]].sum() / max(lengths[dead].sum(), 1)
    tokens = np.bincount(pack_of, lengths, packs)
    waiting = _lockstep(cost, live_in, rank, ranks)
    return Score(
        float(found), float(slowest / best), float(1 - slowest / level), float(1 - best / level),
        float(1 - waiting / level), int((tokens > 0).sum()), int(tokens.max()),
    )  # fmt: skip


def _lockstep(cost: np.ndarray, live_in: np.ndarray, rank: np.ndarray, ranks: int) -> float:
    """Aligned at the end, so that live packs, which come last and by rising cost, meet live packs."""
    order = np.lexsort((cost, live_in, rank))
    count = np.bincount(rank, minlength=ranks)
    place = np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)
    index = place + np.repeat(count.max() - count, count)
    grid = np.zeros((ranks, count.max()))
    live = np.zeros((ranks, count.max()), dtype=bool)
    grid[rank[order], index], live[rank[order], index] = cost[order], live_in[order]
    return float((grid.max(axis=0) * np.where(live.any(axis=0), LIVE, DEAD)).sum())
