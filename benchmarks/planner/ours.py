"""gradprune's plans in the form in which those of its peers come."""

from __future__ import annotations

import numpy as np
from rollouts import Rollout, qwen3_4b_forward

from gradprune.planner import StepPlan

BUDGET = 16384


def as_arrays(plan: StepPlan, sequences: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack of each sequence and rank of each pack; fillers are empty packs."""
    pack_of, rank_of = np.full(sequences, -1), []
    for rank, items in enumerate(plan.ranks):
        for item in items:
            assert (pack_of[list(item.samples)] == -1).all(), "a sequence is planned twice"
            pack_of[list(item.samples)] = len(rank_of)
            rank_of.append(rank)
    assert (pack_of >= 0).all(), "a sequence is not planned"
    return pack_of, np.array(rank_of)


def build(rollout: Rollout, ranks: int, **limits: object) -> StepPlan:
    arguments = {"token_budget": BUDGET, **limits}
    return StepPlan.build(rollout.lengths, rollout.advantages, ranks=ranks, cost=qwen3_4b_forward, **arguments)
