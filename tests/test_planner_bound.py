"""How near a plan is to the best there is, and that nothing is better than its lower bound."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradprune.planner import StepPlan
from gradprune.planning.balance import lower_bound, tighten_bound

BUDGET = 16384


def heavy_tailed(rng, sequences):
    return np.clip((rng.pareto(1.2, sequences) + 1) * 200, 1, 8192)


LENGTHS = {
    "log-normal": lambda rng, n: np.clip(rng.lognormal(6.8, 1.0, n), 1, 8192),
    "pareto": heavy_tailed,
    "bimodal": lambda rng, n: np.where(rng.random(n) < 0.5, rng.normal(300, 40, n), rng.normal(7500, 200, n)),
    "equal": lambda rng, n: np.full(n, 1000),
    "at the budget": lambda rng, n: np.full(n, BUDGET),
    "one to three": lambda rng, n: rng.integers(1, 4, n),
}


def decoder(lengths):
    return 8e9 * lengths + 294912.0 * lengths * (lengths + 1)


def build(draw, ranks, per_rank, group_size, dead_share, seed):
    rng = np.random.default_rng([seed, ranks, per_rank, group_size])
    groups = ranks * per_rank // group_size
    lengths = draw(rng, groups * group_size).astype(int)
    dead = np.repeat(rng.random(groups) < dead_share, group_size)
    return StepPlan.build(lengths, np.where(dead, 0.0, 1.0), token_budget=BUDGET, ranks=ranks, cost=decoder).balance


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(("ranks", "per_rank", "goal"), [(8, 8, 1.05), (8, 16, 1.05), (64, 8, 1.05), (64, 65, 1.01)])
def test_every_shape_of_lengths_comes_near_the_bound(name, ranks, per_rank, goal):
    for group_size, dead_share, seed in product((8, 16), (0.0, 0.6, 0.9, 1.0), (0, 1)):
        balance = build(LENGTHS[name], ranks, per_rank, group_size, dead_share, seed)
        assert balance.slowest <= goal * balance.bound, (group_size, dead_share, seed)


def test_equal_lengths_reach_the_bound():
    """64 a rank, 90 % dead: the mean is some 76 forwards and a fraction, and no rank runs a fraction of a forward."""
    balance = build(LENGTHS["equal"], 1024, 64, 8, 0.9, 0)
    assert balance.slowest == pytest.approx(balance.bound, rel=1e-6)
    assert balance.bound > 1.01 * balance.mean


def test_a_dead_sequence_too_heavy_for_the_gaps_gets_a_rank_with_less_live_work():
    balance = build(heavy_tailed, 8, 16, 16, 0.6, 0)
    assert balance.slowest <= 1.001 * balance.bound == pytest.approx(1.001 * balance.mean)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 3), st.sampled_from([1.0, 0.1, 3e11]))
def test_no_partition_is_better_than_the_bound(weights, bins, unit):
    loads = np.array(weights) * unit
    best = min(np.bincount(place, loads, bins).max() for place in product(range(bins), repeat=len(weights)))
    simple = lower_bound(loads, bins)
    for reached in (best, 1.5 * best, loads.sum() * 1.01):
        bound = tighten_bound(loads, bins, simple, reached)
        assert simple <= bound <= best * (1 + 1e-9)


def test_the_bound_counts_whole_items():
    """Seven items of 1 in three bins: some bin gets three. 3, 3, 1, 1 and 1 in two bins: 5, though 4.5 on average."""
    assert tighten_bound(np.ones(7), 3, 7 / 3, 7.0) == pytest.approx(3.0)
    assert tighten_bound(np.array([3.0, 3, 1, 1, 1]), 2, 4.5, 9.0) == pytest.approx(5.0)
