"""Sequences -> microbatches whose shape fixes their cost: padded rectangles, and a fixed number of sequences in each.

Microbatches are made first, of sequences of one kind and of similar length, then levelled over ranks as they are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradprune.errors import PlanError
from gradprune.planning.balance import Floats, Ints, level, lower_bound, refine, whole_weights
from gradprune.planning.limits import Bools, Items, Limits, check_fit
from gradprune.planning.packing import GOOD_ENOUGH, level_ranks
from gradprune.planning.rollout import nearest_divisor


def pack_by_shape(items: Items, limits: Limits) -> tuple[Ints, Ints]:
    """The pack of each item [items] and the rank of each pack [packs]; no pack is empty.

    Raises PlanError where an item is too long, or counts that are asked for cannot be met.
    """
    if limits.lockstep and limits.num_microbatches is not None and limits.token_budget is not None:
        # A dead pack may have to run live, where another rank has a live one: it must fit the smaller budget.
        limits = replace(
            limits, dead_token_budget=min(limits.dead_token_budget or limits.token_budget, limits.token_budget)
        )
    check_fit(items, limits)
    pack_of = _fixed_size(items, limits) if limits.microbatch_size else _rectangles(items, limits)
    packs = items.merge(pack_of, int(pack_of.max()) + 1, limits.padded)
    if limits.microbatch_size:
        _check_packs(packs, limits)
    rank = _spread(packs, limits)
    if limits.microbatch_size and not limits.padded and not limits.lockstep:
        pack_of = _exchange(items, pack_of, rank, limits)
    return pack_of, rank


def _spread(packs: Items, limits: Limits) -> Ints:
    """Rank of each pack. Counts are even where they must be equal."""
    ranks, count = limits.ranks, limits.num_microbatches
    if count is None:
        return level_ranks(packs, limits, even=limits.lockstep)
    if len(packs) > ranks * count:
        raise PlanError(
            f"num_microbatches is {count}, but the sequences make {len(packs)} microbatches for {ranks} ranks: pass "
            f"num_microbatches={-(-len(packs) // ranks)}, or a larger token_budget"
        )
    # With a multiple of `ranks` in the first round, no rank gets more than `count` in both: promote the cheapest dead.
    late = packs.dead.copy()
    cheap = np.flatnonzero(late)[np.argsort(packs.cost[late], kind="stable")]
    late[cheap[: -np.count_nonzero(~late) % ranks]] = False
    return level_ranks(packs, limits, even=True, late=late)


def _fixed_size(items: Items, limits: Limits) -> Ints:
    """Packs of microbatch_size rows each; at most one holds dead and live rows, the cheapest dead ones."""
    size = limits.microbatch_size
    rows, each = int(items.rows.sum()), int(items.rows[0])
    assert size is not None
    if (items.rows != each).any():
        other = int(np.argmax(items.rows != each))
        raise PlanError(
            f"microbatch_size is {size} and groups are kept whole, but that of sequence {items.first[0]} has {each} "
            f"sequences and that of sequence {items.first[other]} has {items.rows[other]}: pass groups of one size, or "
            "no microbatch_size"
        )
    if size % each:
        raise PlanError(f"microbatch_size is {size}, but groups of {each} are kept whole: pass a multiple of {each}")
    if rows % size:
        raise PlanError(
            f"{rows} sequences do not fill microbatches of {size}: pass whole microbatches, or microbatch_size="
            f"{nearest_divisor(rows, size)}"
        )
    if limits.num_microbatches and rows != size * limits.num_microbatches * limits.ranks:
        raise PlanError(
            f"{rows} sequences are {rows // size} microbatches of {size}, but {limits.ranks} ranks with "
            f"num_microbatches={limits.num_microbatches} take {limits.ranks * limits.num_microbatches}: let one of the "
            "two follow from the other"
        )
    late = _with_live(items, size // each)
    packs = np.array([np.count_nonzero(~late), np.count_nonzero(late)]) * each // size
    if limits.padded:
        order = np.lexsort((-items.width, late))
        pack_of = np.empty(len(items), dtype=np.int64)
        pack_of[order] = np.arange(len(items)) * each // size
        return pack_of
    weights = whole_weights(items.cost) if limits.lockstep else items.tokens.astype(np.float64)
    return level(weights, late.astype(np.int64), packs, even=True)[0]


def _with_live(items: Items, size: int) -> Bools:
    """Which items stand in purely dead packs: the dead, but for the cheapest that fill up the last live pack."""
    late = items.dead.copy()
    cheap = np.flatnonzero(late)[np.argsort(items.cost[late], kind="stable")]
    late[cheap[: -np.count_nonzero(~late) % size]] = False
    return late


def _check_packs(packs: Items, limits: Limits) -> None:
    room = np.where(packs.dead, limits.budget(True), limits.budget(False))
    full = np.flatnonzero(packs.tokens > room)
    if full.size:
        worst = int(full[np.argmax(packs.tokens[full])])
        raise PlanError(
            f"microbatch_size={limits.microbatch_size} gives a microbatch of {packs.tokens[worst]} tokens, "
            f"{limits.budget_name(bool(packs.dead[worst]))} is {int(room[worst])}: pass a smaller microbatch_size, a "
            "larger budget, or no microbatch_size"
        )


def _exchange(items: Items, pack_of: Ints, rank: Ints, limits: Limits) -> Ints:
    """Swaps items between ranks, kind for kind, then deals each rank's items to its packs again.

    Gives `pack_of` back where the new packs would not fit their budget.
    """
    weights: Floats = whole_weights(items.cost * np.maximum(limits.passes(items.dead), 2.0**-20))
    goal = lower_bound(weights, limits.ranks) * GOOD_ENOUGH
    if np.bincount(rank[pack_of], weights).max() <= goal:
        return pack_of
    late = items.merge(pack_of, len(rank), False).dead
    kind = items.dead + 2 * late[pack_of].astype(np.int64)
    rank_of = refine(weights, rank[pack_of], limits.ranks, kind=kind, goal=goal)
    owner_of_pack = rank * 2 + late
    bins = np.bincount(owner_of_pack, minlength=2 * limits.ranks)
    dealt, _ = level(items.tokens.astype(np.float64), rank_of * 2 + late[pack_of], bins, even=True)
    fresh = np.argsort(owner_of_pack, kind="stable")[dealt]
    packs = items.merge(fresh, len(rank), False)
    fits = packs.tokens <= np.where(packs.dead, limits.budget(True), limits.budget(False))
    return fresh if fits.all() and (packs.dead == late).all() else pack_of


def _rectangles(items: Items, limits: Limits) -> Ints:
    """Packs of neighbours in width, dead and live apart, each within its budget; as many as equal counts ask for."""
    order = np.lexsort((-items.width, ~items.dead))
    cut = int(np.count_nonzero(items.dead))
    starts_dead = _slices(items.take(order[:cut]), limits.budget(True))
    starts_live = _slices(items.take(order[cut:]), limits.budget(False))
    dead, live = len(starts_dead), len(starts_live)
    more_dead = more_live = 0
    if limits.num_microbatches is not None:
        more_dead = max(limits.num_microbatches * limits.ranks - dead - live, 0)
    elif limits.lockstep:
        more_dead, more_live = -dead % limits.ranks, -live % limits.ranks
    starts_dead = _split(starts_dead, cut, more_dead)
    starts_live = _split(starts_live, len(items) - cut, more_live + max(dead + more_dead - len(starts_dead), 0))
    first = np.zeros(len(items), dtype=np.int64)
    first[np.concatenate([starts_dead, starts_live + cut])] = 1
    pack_of = np.empty(len(items), dtype=np.int64)
    pack_of[order] = np.cumsum(first) - 1
    return pack_of


def _slices(items: Items, budget: float) -> Ints:
    """Where rectangles of at most `budget` tokens begin, over items sorted by falling width."""
    starts, rows = [], np.concatenate([[0], np.cumsum(items.rows)])
    at = 0
    while at < len(items):
        starts.append(at)
        most = rows[at] + budget // items.width[at]
        at = max(int(np.searchsorted(rows, most, side="right")) - 1, at + 1)
    return np.array(starts, dtype=np.int64)


def _split(starts: Ints, end: int, more: int) -> Ints:
    """Up to `more` further starts, halving the longest slices; fewer where every slice is one item."""
    while more > 0 and len(starts):
        sizes = np.diff(np.append(starts, end))
        longest = np.argsort(-sizes, kind="stable")[:more]
        longest = longest[sizes[longest] > 1]
        if not len(longest):
            break
        starts = np.sort(np.concatenate([starts, starts[longest] + (sizes[longest] + 1) // 2]))
        more -= len(longest)
    return starts
