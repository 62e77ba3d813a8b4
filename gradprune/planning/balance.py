"""Number partitioning: items -> bins of nearly equal load, many independent problems at once, in NumPy.

Weights are whole numbers held in float64 (`whole_weights`): sums are exact in any order, and every machine makes the
same partition. The *owner* of an item is the problem that it belongs to; bins are numbered through, owner after owner.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def whole_weights(cost: Floats) -> Floats:
    """Costs scaled by a power of two and rounded to whole numbers >= 1, small enough that the sum of all is exact."""
    bits = min(31, 52 - len(cost).bit_length())
    _, exponent = np.frexp(cost.max(initial=0.0))
    return np.maximum(np.rint(np.ldexp(cost, bits - int(exponent))), 1.0)


def lower_bound(weights: Floats, bins: int) -> float:
    """No partition of `weights` into `bins` has a smaller largest load.

    The largest of: the mean load; for each k, the sum of the k + 1 lightest of the k * bins + 1 heaviest items, since
    some bin holds k + 1 of those (k = 0: the heaviest item).
    """
    if not len(weights):
        return 0.0
    heavy = -np.sort(-weights)
    total = np.concatenate([[0.0], np.cumsum(heavy)])
    last = np.arange(0, len(heavy), bins)  # k * bins, the place of the lightest among the k * bins + 1 heaviest
    crowded = total[last + 1] - total[last - np.arange(len(last))]
    return float(max(total[-1] / bins, crowded.max()))


def tighten_bound(weights: Floats, bins: int, bound: float, reached: float) -> float:
    """A lower bound as `lower_bound`, at least `bound`, for where a partition with the largest load `reached` is known.

    A largest load C is impossible if for some k the sum of floor((k + 1) w / C) / k is more than the bins: Fekete and
    Schepers 2001, "New classes of fast lower bounds for bin packing problems", with their dual feasible functions u^(k)
    rounded down. C is found by bisection.
    """
    distinct, count = np.unique(weights[weights > 0], return_counts=True)
    if len(distinct) > _DISTINCT:
        return bound
    last = min(256, _CELLS // max(len(distinct), 1))
    for _ in range(24):
        middle = (bound + reached) / 2
        share = distinct / middle
        if any(np.floor((k + 1) * share - 1e-9).clip(0) @ count > bins * k for k in range(1, last)):
            bound = middle
        else:
            reached = middle
    return bound


_DISTINCT, _CELLS = 20_000, 500_000  # weights looked at, and these times k; about a tenth of a second


def level(
    weights: Floats, owner: Ints, bins: Ints, loads: Floats | None = None, *, even: bool = False
) -> tuple[Ints, Floats]:
    """Heaviest item to the lightest bin (LPT), for every owner at once: the bin of each item [n], and the bins' loads.

    weights [n]: whole numbers >= 1. owner [n]. bins [owners]: how many bins each has, >= 1 where it has items. loads:
    what bins hold already. even: every bin of an owner gets equally many items, up to one.

    A round serves all the bins that the sequential rule would visit before it returns to the first. Where bins are few
    for their items it goes over them back and forth several times, so that rounds stay few; the last ones never do.
    """
    order = _order(owner, -weights)
    heavy = weights[order]
    cursor, end = _ranges(np.bincount(owner, minlength=len(bins)))
    owner_of_bin = np.repeat(np.arange(len(bins)), bins)
    loads = np.zeros(len(owner_of_bin)) if loads is None else loads.copy()
    bin_of = np.empty(len(weights), dtype=np.int64)
    while (busy := np.flatnonzero(cursor < end)).size:
        served = np.flatnonzero((cursor < end)[owner_of_bin])
        ranked = served[_order(owner_of_bin[served], loads[served])]
        first, _ = _ranges(bins[busy])
        left = end[busy] - cursor[busy]
        if even:
            take, turns = bins[busy], np.ones(len(busy), dtype=np.int64)
        else:
            take, turns = _round_sizes(loads[ranked], first, bins[busy], heavy[cursor[busy]], left)
        amount = np.minimum(take * turns, left)
        chosen, item = _serve(ranked, first, take, amount, cursor[busy])
        bin_of[order[item]] = chosen
        loads += np.bincount(chosen, heavy[item], len(loads))
        cursor[busy] += amount
    return bin_of, loads


def _order(owner: Ints, key: Floats) -> Ints:
    """Stable order by owner, then by rising `key` of whole numbers; one sort where both fit into 62 bits."""
    if not len(key):
        return np.empty(0, dtype=np.int64)
    low, high = int(key.min()), int(key.max())
    if (high - low + 1).bit_length() + int(owner.max()).bit_length() > 62:
        return np.lexsort((key, owner))
    return np.argsort(owner * (high - low + 1) + (key.astype(np.int64) - low), kind="stable")


def _ranges(sizes: Ints) -> tuple[Ints, Ints]:
    end = np.cumsum(sizes)
    return end - sizes, end


def _round_sizes(ranked_loads: Floats, first: Ints, bins: Ints, heaviest: Floats, left: Ints) -> tuple[Ints, Ints]:
    """How many of an owner's lightest bins a round serves, and how often each. Loads come sorted within each owner."""
    lightest = ranked_loads[first]
    below = ranked_loads <= np.repeat(lightest + heaviest, bins)
    take = np.add.reduceat(below.astype(np.int64), first)
    # The bins served are at least `heaviest` below the next one: fill that gap in one go.
    next_load = ranked_loads[np.minimum(first + take, len(ranked_loads) - 1)]
    gap = ((next_load - lightest) // heaviest).astype(np.int64)
    turns = np.where(take < bins, np.maximum(gap, 1), np.minimum(_BATCH // take, left // (_TAIL * take)))
    turns = np.where(bins == 1, left, turns)
    return take, np.maximum(turns, 1)


_BATCH = 512  # items a round hands out where bins are fewer; trades rounds for quality
_TAIL = 32  # items a bin that are always handed out one by one at the end


def _serve(ranked: Ints, first: Ints, take: Ints, amount: Ints, cursor: Ints) -> tuple[Ints, Ints]:
    """The bins and sorted items that one round brings together, back and forth over the `take` lightest bins."""
    which = np.repeat(np.arange(len(amount)), amount)
    start, _ = _ranges(amount)
    place = np.arange(len(which)) - start[which]
    turn, seat = np.divmod(place, take[which])
    seat = np.where(turn % 2, take[which] - 1 - seat, seat)
    return ranked[first[which] + seat], cursor[which] + place


def refine(weights: Floats, bin_of: Ints, bins: int, *, kind: Ints | None = None, goal: float = 0.0) -> Ints:
    """A partition whose largest load is not larger, by moving and swapping items between heavy and light bins.

    kind [n]: items are only swapped, like kind for like, so that every bin keeps its number of each. goal: stops once
    the largest load is at most this. Deterministic; a bounded number of tries.
    """
    bin_of = bin_of.copy()
    loads: Floats = np.bincount(bin_of, weights, bins).astype(np.float64)
    turn = idle = tries = 0
    while bins > 1 and tries < _TRIES and idle < bins:
        worst = loads.max()
        if worst <= goal:
            break
        tries += _OVERHEAD + _sweep(weights, bin_of, loads, kind, goal, turn)
        idle = 0 if loads.max() < worst else idle + 1
        turn += 1
    return bin_of


_TRIES, _OVERHEAD = 20_000, 32  # pairs looked at in all, about a second; the sorting of a sweep in pairs


def _sweep(weights: Floats, bin_of: Ints, loads: Floats, kind: Ints | None, goal: float, turn: int) -> int:
    """Pairs bins above the goal with light ones, each turn others, and mends each pair. In place; counts the pairs."""
    order = np.argsort(bin_of, kind="stable")
    start = np.searchsorted(bin_of[order], np.arange(len(loads) + 1))
    rank = np.argsort(-loads, kind="stable")
    heavy = min(int(np.count_nonzero(loads > goal)), len(rank) // 2)
    light = np.roll(rank[heavy:][::-1], -turn)
    for one, two in zip(rank[:heavy].tolist(), light.tolist()):
        mine, theirs = order[start[one] : start[one + 1]], order[start[two] : start[two + 1]]
        best = _best_exchange(weights, kind, mine, theirs, (loads[one] - loads[two]) / 2)
        if best is None:
            continue
        give, get = best
        delta = weights[give] - (0.0 if get is None else weights[get])
        loads[one] -= delta
        loads[two] += delta
        bin_of[give] = two
        if get is not None:
            bin_of[get] = one
    return heavy


def _best_exchange(
    weights: Floats, kind: Ints | None, mine: Ints, theirs: Ints, wanted: float
) -> tuple[int, int | None] | None:
    """The item to give, and the one to get back or None, whose difference comes nearest to `wanted`."""
    best, nearest = None, wanted  # an exchange must leave the pair nearer than it is
    for name in [None] if kind is None else np.unique(kind[mine]).tolist():
        ours, others = (mine, theirs) if kind is None else (mine[kind[mine] == name], theirs[kind[theirs] == name])
        back = weights[others] if kind is not None else np.append(weights[others], 0.0)
        if not len(back):
            continue
        ascending = np.argsort(back, kind="stable")
        target = weights[ours] - wanted
        right = np.searchsorted(back[ascending], target)
        for side in (np.minimum(right, len(back) - 1), np.maximum(right - 1, 0)):
            miss = np.abs(back[ascending[side]] - target)
            k = int(np.argmin(miss))
            if miss[k] < nearest:
                other = int(ascending[side[k]])
                nearest, best = float(miss[k]), (int(ours[k]), int(others[other]) if other < len(others) else None)
    return best
