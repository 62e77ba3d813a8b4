"""Sequences -> microbatches of every rank by token budget, dead and live apart.

Ranks are levelled first, sequence by sequence, on what a sequence costs once dead backwards are pruned; each rank then
packs its own. Deterministic: whole numbers decide, ties go to the lower index.
"""

from __future__ import annotations

import numpy as np

from gradprune.errors import PlanError
from gradprune.planning.balance import Floats, Ints, level, lower_bound, refine, whole_weights
from gradprune.planning.limits import Bools, Items, Limits, check_fit


def pack_by_budget(items: Items, limits: Limits) -> tuple[Ints, Ints]:
    """The pack of each item [items] and the rank of each pack [packs]; no pack is empty.

    Raises PlanError where an item is too long, or a fixed number of microbatches too small for all.
    """
    check_fit(items, limits)
    try:
        return _pack_ranks(items, level_ranks(items, limits), limits)
    except _TooFullError:
        pass  # level in cost is not level in tokens: a fixed number of microbatches may hold the latter only
    tokens, nobody = items.tokens.astype(np.float64), np.zeros(len(items), dtype=np.int64)
    by_tokens, _ = level(tokens, nobody, np.array([limits.ranks]))
    try:
        return _pack_ranks(items, by_tokens, limits)
    except _TooFullError as full:
        raise PlanError(
            f"num_microbatches is {limits.num_microbatches}, but rank {full.rank} has {full.tokens} tokens for "
            f"{limits.budget_name(False)}={int(limits.budget(False))}: pass num_microbatches={full.enough}, or a "
            "larger budget"
        ) from None


class _TooFullError(Exception):
    """A rank's items do not fit into a fixed number of microbatches; `enough` of them would do."""

    def __init__(self, rank: int, tokens: int, enough: int) -> None:
        super().__init__()
        self.rank, self.tokens, self.enough = rank, tokens, enough


def level_ranks(items: Items, limits: Limits, *, even: bool = False, late: Bools | None = None) -> Ints:
    """Rank of each item, for the shortest time of the slowest rank.

    Live items are levelled first, dead ones into what is left, then items are moved and swapped. In lockstep, and where
    a dead forward takes no time, dead ones are levelled by themselves: no rank's dead work can fill another's live gap.

    even: in each of the two rounds every rank gets equally many, up to one. late [items]: which items come second;
    by default the dead.
    """
    late = items.dead if late is None else late
    apart = limits.lockstep or limits.reuse_forward
    weights = whole_weights(items.cost * np.where(apart & late, 1.0, limits.passes(items.dead)))
    ranks, rank_of = np.array([limits.ranks]), np.zeros(len(items), dtype=np.int64)
    loads = None
    for part in (np.flatnonzero(~late), np.flatnonzero(late)):
        rank_of[part], loads = level(weights[part], rank_of[part], ranks, None if apart else loads, even=even)
    if even and limits.lockstep:
        return rank_of  # rounds put like costs at like indices; swaps would make ranks wait for each other
    if not apart:
        return _refine_ranks(items, weights, rank_of, limits, even)
    for part in (np.flatnonzero(~late), np.flatnonzero(late)):
        goal = lower_bound(weights[part], limits.ranks) * GOOD_ENOUGH
        kind = items.dead[part].astype(np.int64) if even else None
        rank_of[part] = refine(weights[part], rank_of[part], limits.ranks, kind=kind, goal=goal)
    return rank_of


def _refine_ranks(items: Items, weights: Floats, rank_of: Ints, limits: Limits, even: bool) -> Ints:
    """Moves and swaps; where these do not reach the goal, the same again from all items levelled in one round.

    A dead item may be too heavy for the gaps that the live ones leave.
    """
    ranks, goal = limits.ranks, lower_bound(weights, limits.ranks) * GOOD_ENOUGH
    kind = items.dead.astype(np.int64) if even else None
    best = refine(weights, rank_of, ranks, kind=kind, goal=goal)
    reached = np.bincount(best, weights, ranks).max()
    if even or reached <= goal:
        return best
    together, _ = level(weights, np.zeros(len(items), dtype=np.int64), np.array([ranks]))
    other = refine(weights, together, ranks, goal=goal)
    return other if np.bincount(other, weights, ranks).max() < reached else best


GOOD_ENOUGH = 1.0005  # times the lower bound: swapping stops there


def _pack_ranks(items: Items, rank_of: Ints, limits: Limits) -> tuple[Ints, Ints]:
    """Every rank's own items into its microbatches: as few as the budgets allow, or as many as the limits ask for."""
    dead, live = np.flatnonzero(items.dead), np.flatnonzero(~items.dead)
    have_dead, have_live = (np.bincount(rank_of[part], minlength=limits.ranks) for part in (dead, live))
    want_dead = want_live = np.zeros(limits.ranks, dtype=np.int64)
    while True:  # counts only grow, up to one item a microbatch
        bins_dead, pack_dead = _fewest(items.take(dead), rank_of[dead], want_dead, limits, True)
        bins_live, pack_live = _fewest(items.take(live), rank_of[live], want_live, limits, False)
        want_dead, want_live = _counts(bins_dead, bins_live, have_dead, have_live, limits)
        if limits.num_microbatches is not None and (want_live + want_dead > limits.num_microbatches).any():
            return _pack_mixed(items, rank_of, want_dead, want_live, limits)
        settled = (np.minimum(want_dead, have_dead) == bins_dead) & (np.minimum(want_live, have_live) == bins_live)
        if settled.all():
            break
    pack_of = np.empty(len(items), dtype=np.int64)
    pack_of[dead], pack_of[live] = pack_dead, pack_live + bins_dead.sum()
    return pack_of, np.concatenate([np.repeat(np.arange(limits.ranks), bins) for bins in (bins_dead, bins_live)])


def _fewest(items: Items, rank_of: Ints, at_least: Ints, limits: Limits, dead: bool) -> tuple[Ints, Ints]:
    """Bins of each rank, about as few as the budget allows, and the bin of each item.

    In lockstep bins are level in cost, since ranks wait for each other at every index; else in tokens, which needs
    fewer.
    """
    budget = limits.budget(dead)
    have = np.bincount(rank_of, minlength=limits.ranks)
    least = np.ceil(np.bincount(rank_of, items.tokens, limits.ranks) / budget).astype(np.int64)
    large = np.bincount(rank_of, items.tokens * 2 > budget, limits.ranks).astype(np.int64)
    bins = np.minimum(np.maximum(np.maximum(least, large), at_least), have)
    by_cost = limits.lockstep and limits.num_microbatches is None
    weights = whole_weights(items.cost) if by_cost else items.tokens.astype(np.float64)
    bin_of = np.empty(len(items), dtype=np.int64)
    todo = have > 0
    while todo.any():
        part = np.flatnonzero(todo[rank_of])
        owner = (np.cumsum(todo) - 1)[rank_of[part]]
        count = bins[todo]
        bin_of[part], _ = level(weights[part], owner, count)
        full = np.bincount(bin_of[part], items.tokens[part], count.sum()) > budget
        bin_of[part] -= (np.cumsum(count) - count)[owner]
        todo = np.bincount(np.repeat(np.flatnonzero(todo), count)[full], minlength=limits.ranks) > 0
        bins[todo] = np.minimum(bins[todo] + np.maximum(bins[todo] // 32, 1), have[todo])
    return bins, bin_of + (np.cumsum(bins) - bins)[rank_of]


def _counts(dead: Ints, live: Ints, have_dead: Ints, have_live: Ints, limits: Limits) -> tuple[Ints, Ints]:
    """Microbatches of each rank, dead and live, grown from `dead` and `live` to what the limits ask for.

    Dead ones are split before live ones; a rank with too few items to split gets fillers later.
    """
    if limits.lockstep:
        dead, live = np.full_like(dead, dead.max()), np.full_like(live, live.max())
        have_dead, have_live = np.full_like(dead, have_dead.max()), np.full_like(live, have_live.max())
    total = dead + live
    if limits.num_microbatches is not None:
        extra = np.maximum(limits.num_microbatches - total, 0)
    else:
        extra = (total == 0) + -np.maximum(total, 1) % limits.multiple_of
    more_live = np.clip(extra - (have_dead - dead), 0, np.maximum(have_live - live, 0))
    return dead + extra - more_live, live + more_live


def _pack_mixed(items: Items, rank_of: Ints, want_dead: Ints, want_live: Ints, limits: Limits) -> tuple[Ints, Ints]:
    """For a fixed number of microbatches too small to keep dead and live apart: dead items fill up live microbatches.

    Dead microbatches, as many as the live ones leave, are filled first; what does not fit goes to the fullest live one
    that has room.
    """
    count = limits.num_microbatches
    assert count is not None
    cuts = count - want_live  # of each rank: its packs below are for the dead only
    tokens = np.bincount(rank_of, items.tokens, limits.ranks)
    room = np.full((limits.ranks, count), limits.budget(False))
    pure = np.arange(count) < cuts[:, None]
    room[pure] = limits.budget(True)
    pack_of = np.empty(len(items), dtype=np.int64)
    for item in np.lexsort((-items.tokens, items.dead)).tolist():
        rank = int(rank_of[item])
        fits = room[rank] >= items.tokens[item]
        for choices in (fits & pure[rank] & items.dead[item], fits & ~pure[rank]):
            if choices.any():
                pack = int(np.argmin(np.where(choices, room[rank], np.inf)))
                break
        else:
            raise _TooFullError(rank, int(tokens[rank]), int((want_dead + want_live).max()))
        room[rank, pack] -= items.tokens[item]
        pack_of[item] = rank * count + pack
    used, packed = np.unique(pack_of, return_inverse=True)
    return packed.astype(np.int64), used // count
