"""What a pipeline's bubble should shrink to: one forward, one backward, by arithmetic, against the measured step."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from qwen import HAS_GPU, Shape, make_batches

MICROBATCHES, DEAD = 10, {0, 2, 3, 5, 6, 8}
REPEATS = 3
DEVICE = "cuda" if HAS_GPU else "cpu"


def bubble(ranks: Any, stages: int, tokens: int) -> dict[str, float]:
    """Milliseconds of a step of `MICROBATCHES` equal microbatches, `DEAD` of them dead: measured and by arithmetic.

    The time of a forward and of a backward on a stage is fitted, as a multiple of its share of the weights, to the
    measured forward-only and unpruned steps; the pruned step is then predicted from it, a dead backward taking nothing.
    """
    batches = make_batches(MICROBATCHES, tokens, DEAD, ranks.shape.vocabulary, DEVICE)
    arms = {
        "forward only": lambda: ranks.run(batches, False, forward_only=True),
        "unpruned": lambda: ranks.run(batches, False),
        "pruned": lambda: ranks.run(batches, True),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(2):
        for call in arms.values():
            call()
    for _ in range(REPEATS):
        for name, call in arms.items():
            times[name].append(1e3 * ranks.timed(call)[0])
    measured = {name: median(values) for name, values in times.items()}
    shares = weights(ranks.shape, stages)
    nothing = [0.0] * MICROBATCHES
    forward = measured["forward only"] / makespan(shares, [1.0] * MICROBATCHES, nothing)
    ones = [forward] * MICROBATCHES
    low, high = 0.0, measured["unpruned"]
    for _ in range(60):
        middle = (low + high) / 2
        short = makespan(shares, ones, [middle] * MICROBATCHES) < measured["unpruned"]
        low, high = (middle, high) if short else (low, middle)
    backwards = [0.0 if index in DEAD else low for index in range(MICROBATCHES)]
    return {**measured, "predicted": makespan(shares, ones, backwards)}


def weights(shape: Shape, stages: int) -> list[float]:
    """Share of each stage in the multiplications of a forward: equal layers, and the vocabulary on the last one."""
    layer = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads) + 3 * shape.hidden * shape.ffn
    parts = [float(layer * shape.layers / stages)] * stages
    parts[-1] += shape.hidden * shape.vocabulary
    return [part / sum(parts) for part in parts]


def makespan(shares: Sequence[float], forwards: Sequence[float], backwards: Sequence[float]) -> float:
    """When the last stage of a 1F1B schedule is done; microbatch i takes ``shares[s] * forwards[i]`` on stage s."""
    stages, count = len(shares), len(forwards)
    done: dict[tuple[str, int, int], float] = {}
    orders = [_order(stages - 1 - stage, count) for stage in range(stages)]
    clocks, places = [0.0] * stages, [0] * stages
    while any(place < len(order) for place, order in zip(places, orders)):
        for stage in range(stages):
            while places[stage] < len(orders[stage]):
                kind, index = orders[stage][places[stage]]
                before = stage - 1 if kind == "forward" else stage + 1
                if 0 <= before < stages and (kind, before, index) not in done:
                    break
                length = shares[stage] * (forwards if kind == "forward" else backwards)[index]
                clocks[stage] = max(clocks[stage], done.get((kind, before, index), 0.0)) + length
                done[kind, stage, index] = clocks[stage]
                places[stage] += 1
    return max(clocks)


def _order(ahead: int, count: int) -> list[tuple[str, int]]:
    """What a stage with `ahead` stages after it does, in order."""
    order = [("forward", index) for index in range(min(ahead, count))]
    for index in range(count):
        if index + ahead < count:
            order.append(("forward", index + ahead))
        order.append(("backward", index))
    return order
