"""Planners that trainers use, each written from its published description. All give (pack of each sequence, rank of
each pack), from the same input: lengths, forward FLOPs, token budget, ranks."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

Plan = tuple[np.ndarray, np.ndarray]


def largest_differencing(weights: np.ndarray, parts: int, equal: bool) -> np.ndarray:
    """Part of each item by the Karmarkar-Karp largest differencing method for several parts (Karmarkar and Karp 1982;
    the many-way form of Korf 2009). equal: parts of one size, by starting from tuples of `parts` neighbours."""
    order = np.argsort(-weights, kind="stable")
    if equal and len(order) % parts:
        raise ValueError("equal parts need a multiple of their number")
    leaves = order.reshape(-1, parts) if equal else order[:, None]
    nodes: list[tuple[np.ndarray, int, int, np.ndarray | None]] = []
    heap = []
    for leaf in leaves:
        sums = np.zeros(parts)
        sums[: len(leaf)] = weights[leaf]
        nodes.append((sums, -1, len(nodes), None))
        heap.append((-(sums.max() - sums.min()), len(nodes) - 1))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, one = heapq.heappop(heap)
        _, two = heapq.heappop(heap)
        first, second = np.argsort(-nodes[one][0], kind="stable"), np.argsort(nodes[two][0], kind="stable")
        place = np.empty(parts, dtype=np.int64)  # of two's parts within one's
        place[second] = first
        sums = nodes[one][0].copy()
        sums[first] += nodes[two][0][second]
        nodes.append((sums, one, two, place))
        heapq.heappush(heap, (-(sums.max() - sums.min()), len(nodes) - 1))
    part_of = np.empty(len(weights), dtype=np.int64)
    stack = [(len(nodes) - 1, np.arange(parts))]
    while stack:
        node, names = stack.pop()
        _, one, two, place = nodes[node]
        if place is None:
            leaf = leaves[two]
            part_of[leaf] = names[: len(leaf)]
        else:
            stack += [(one, names), (two, names[place])]
    return part_of


def differencing_on_tokens(lengths: np.ndarray, flops: np.ndarray, budget: int, ranks: int) -> Plan:
    """As verl: ranks of equal size by Karmarkar-Karp on tokens, then each rank's microbatches by the same, as many on
    every rank as the fullest one needs."""
    rank_of = largest_differencing(lengths.astype(float), ranks, equal=True)
    tokens = np.bincount(rank_of, lengths, ranks)
    count = int(np.ceil(tokens.max() / budget))
    pack_of = np.empty(len(lengths), dtype=np.int64)
    for rank in range(ranks):
        mine = np.flatnonzero(rank_of == rank)
        pack_of[mine] = rank * count + largest_differencing(lengths[mine].astype(float), count, equal=False)
    return pack_of, np.repeat(np.arange(ranks), count)


def first_fit(lengths: np.ndarray, order: np.ndarray, budget: int) -> np.ndarray:
    """Pack of each sequence: in `order`, each into the first pack that has room."""
    room = np.full(len(lengths), budget)
    pack_of = np.empty(len(lengths), dtype=np.int64)
    opened = 1
    closed = 0  # packs before this one are full for the shortest sequence
    shortest = lengths.min()
    for sequence in order.tolist():
        pack = closed + int(np.argmax(room[closed : opened + 1] >= lengths[sequence]))
        opened = max(opened, pack + 1)
        room[pack] -= lengths[sequence]
        pack_of[sequence] = pack
        while room[closed] < shortest:
            closed += 1
    return pack_of


def first_fit_decreasing(lengths: np.ndarray, flops: np.ndarray, budget: int, ranks: int) -> Plan:
    """First-fit-decreasing packs over all sequences, dealt to the ranks in turn."""
    pack_of = first_fit(lengths, np.argsort(-lengths, kind="stable"), budget)
    return pack_of, np.arange(pack_of.max() + 1) % ranks


def pack_then_distribute(lengths: np.ndarray, flops: np.ndarray, budget: int, ranks: int) -> Plan:
    """As slime: first-fit packs in rollout order, then packs to ranks of equal count by Karmarkar-Karp on FLOPs."""
    pack_of = first_fit(lengths, np.arange(len(lengths)), budget)
    packs = int(pack_of.max()) + 1
    padded = -(-packs // ranks) * ranks  # empty packs make the counts equal
    cost = np.bincount(pack_of, flops, padded)
    return pack_of, largest_differencing(cost, ranks, equal=True)


def random_order(lengths: np.ndarray, flops: np.ndarray, budget: int, ranks: int) -> Plan:
    """Shuffled, dealt to ranks in equal counts, each rank packed in that order, a new pack where the last is full."""
    order = np.random.default_rng(0).permutation(len(lengths))
    pack_of = np.empty(len(lengths), dtype=np.int64)
    rank_of_pack: list[int] = []
    for rank, mine in enumerate(np.array_split(order, ranks)):
        filled = budget + 1
        for sequence in mine.tolist():
            if filled + lengths[sequence] > budget:
                rank_of_pack.append(rank)
                filled = 0
            filled += lengths[sequence]
            pack_of[sequence] = len(rank_of_pack) - 1
    return pack_of, np.array(rank_of_pack)


PEERS: dict[str, Callable[[np.ndarray, np.ndarray, int, int], Plan]] = {
    "random order": random_order,
    "first-fit-decreasing": first_fit_decreasing,
    "Karmarkar-Karp on tokens": differencing_on_tokens,
    "pack, then distribute": pack_then_distribute,
}
