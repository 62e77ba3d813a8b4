"""Which existing microbatch is dead: shapes, exact zeros, bad input. Binding is in test_planner_binding.py."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradprune.errors import PlanError
from gradprune.planner import StepPlan


def dead_flags(plan: StepPlan) -> list[bool]:
    return [item.dead for item in plan.ranks[0]]


def test_prunes_rows_of_zero_advantage():
    plan = StepPlan.from_rollout(torch.tensor([0.0, -0.0, 0.0, 0.0]), None, 2)
    assert dead_flags(plan) == [True, True]
    assert plan.ranks[0][0].reason == "advantages == 0 in all 2 rows"


def test_keeps_the_smallest_nonzero_advantage():
    plan = StepPlan.from_rollout(torch.tensor([0.0, 1e-45, 0.0, 0.0]), None, 2)
    assert dead_flags(plan) == [False, True]
    assert plan.ranks[0][0].reason == "advantages != 0 in row 1"


def test_prunes_where_advantage_and_mask_cover_each_other():
    advantages = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.bfloat16)
    mask = torch.tensor([[False, True], [True, False]])
    assert dead_flags(StepPlan.from_rollout(advantages, mask, 1)) == [True, True]


def test_keeps_advantage_shifted_against_the_mask():
    advantages = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    mask = torch.tensor([[1, 0], [1, 0]])
    assert dead_flags(StepPlan.from_rollout(advantages, mask, 1)) == [False, True]


def test_prunes_row_advantage_against_token_mask():
    """[R] against [R, T] is aligned at the rows even where R == T, unlike broadcasting from the right."""
    mask = torch.tensor([[1, 1], [0, 0]])
    assert dead_flags(StepPlan.from_rollout(torch.tensor([0.0, 3.0]), mask, 1)) == [True, True]
    assert dead_flags(StepPlan.from_rollout(torch.tensor([3.0, 0.0]), mask, 1)) == [False, True]


def test_prunes_packed_sequences():
    lengths = [2, 3, 1]
    packed = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    plan = StepPlan.from_rollout(packed, None, [[0, 2], [1]], lengths=lengths)
    assert dead_flags(plan) == [True, False]
    assert [item.tokens for item in plan.ranks[0]] == [3, 3] and plan.dead_tokens == 3


def test_keeps_packed_sequence_with_row_advantage_and_token_mask():
    mask = np.array([0, 0, 0, 1, 0, 0])
    assert dead_flags(StepPlan.from_rollout([5.0, 5.0, 5.0], mask, 1, lengths=[2, 3, 1])) == [True, False, True]
    assert dead_flags(StepPlan.from_rollout([5.0, 0.0, 5.0], mask, 1, lengths=[2, 3, 1])) == [True, True, True]


def test_prunes_by_three_factors():
    factors = {
        "advantages": np.array([1.0, 1.0]),
        "mask": np.array([[1, 0], [1, 1]]),
        "weight": np.array([[0, 3], [0, 1]]),
    }
    assert dead_flags(StepPlan.from_factors(factors, 1)) == [True, False]


@given(
    hnp.arrays(np.float32, (6, 4), elements=st.sampled_from([0.0, -0.0, 1.5])),
    hnp.arrays(np.bool_, (6, 4)),
    st.permutations(range(6)),
    st.lists(st.integers(0, 6), max_size=3),
)
def test_dead_exactly_where_the_product_is_zero(advantages, mask, order, cuts):
    parts = np.split(np.array(order), sorted(cuts))
    plan = StepPlan.from_rollout(advantages, mask, parts)
    assert dead_flags(plan) == [not np.any(advantages[part] * mask[part]) for part in parts]
    assert sorted(row for item in plan.ranks[0] for row in item.samples) == list(range(6))


def test_reports_residue_of_equal_rewards():
    """Eight float32 rewards of 2.6, summed one by one, have a mean that is 2**-22 off; / (std + 1e-6) makes it 0.19."""
    rewards = torch.full((8,), 2.6)
    centred = rewards - sum(rewards) / 8
    assert torch.equal(centred.abs(), torch.full((8,), 2.0**-22))
    advantages = centred / (centred.square().sum().div(7).sqrt() + 1e-6)
    assert advantages.abs().max() > 0.1
    advantages = torch.cat([advantages, torch.tensor([1.0, -1.0] * 4), torch.zeros(8)])
    plan = StepPlan.from_rollout(advantages, None, 8, group_size=8)
    assert [(group.group, group.rows) for group in plan.uniform] == [(0, tuple(range(8)))]
    assert plan.uniform[0].residue == float(advantages[0].abs())
    assert dead_flags(plan) == [False, False, True]
    assert "group 0: 8 equal rewards, advantage" in str(plan)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: StepPlan.from_rollout([0.0, float("nan")], None, 1), r"advantages\[1\] is nan \(row 1\)"),
        (lambda: StepPlan.from_rollout([[0.0], [float("inf")]], None, 1), r"advantages\[1, 0\] is inf \(row 1\)"),
        (
            lambda: StepPlan.from_rollout([0, 0, 0, float("nan")], None, 1, lengths=[3, 1]),
            r"advantages\[3\] is nan \(row 1\)",
        ),
        (lambda: StepPlan.from_rollout(torch.empty(4, device="meta"), None, 1), r"on meta: pass advantages\.cpu\(\)"),
        (lambda: StepPlan.from_rollout([[0.0], [0.0, 1.0]], None, 1), "advantages is ragged"),
        (lambda: StepPlan.from_rollout(1.0, None, 1), "advantages is a scalar"),
        (lambda: StepPlan.from_rollout(["a"], None, 1), "not numbers"),
        (
            lambda: StepPlan.from_rollout(np.zeros(63), None, 9, group_size=8),
            "advantages has 63 rows, group_size is 8: pass whole groups, or group_size=9",
        ),
        (lambda: StepPlan.from_rollout(np.zeros(63), None, 8), "microbatches of 8 rows do not divide them.*=9"),
        (lambda: StepPlan.from_rollout(np.zeros(4), None, [2, 1]), "sum to 3, advantages has 4 rows"),
        (lambda: StepPlan.from_rollout(np.zeros(3), None, [[0], [0, 1]]), "row 0 of advantages is in 2 microbatches"),
        (lambda: StepPlan.from_rollout(np.zeros(3), None, [[0], [1]]), "row 2 of advantages is in 0 microbatches"),
        (lambda: StepPlan.from_rollout(np.zeros(2), None, [[0], [2]]), r"microbatches\[1\] names row 2"),
        (lambda: StepPlan.from_rollout(np.zeros(2), np.zeros((3, 2)), 1), r"\[2\] and mask \[3, 2\].*dimension 0"),
        (lambda: StepPlan.from_rollout(np.zeros((2, 4)), np.zeros((2, 3)), 1), "dimension 1 is 4 against 3"),
        (lambda: StepPlan.from_rollout(np.zeros(5), None, 1, lengths=[2, 2]), "5 rows, lengths has 2 and sums to 4"),
        (lambda: StepPlan.from_rollout(np.zeros(2), None, 1, lengths=[2, -1]), r"lengths\[1\] is -1"),
        (lambda: StepPlan.from_rollout(np.zeros(2), None, 1, lengths=[2, float("nan")]), r"lengths\[1\] is nan"),
        (lambda: StepPlan.from_rollout(np.zeros(3), None, [[0.5, 1], [2]]), r"microbatches\[0\] holds float64"),
        (lambda: StepPlan.from_rollout(np.zeros(2), None, [[True, False], [1]]), r"microbatches\[0\] holds bool"),
        (lambda: StepPlan.from_rollout(np.zeros(4), None, 1.5), "microbatches is 1.5"),
        (lambda: StepPlan.from_factors({}, 1), "no factor was passed"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(PlanError, match=message):
        call()


def test_is_frozen_hashable_picklable_and_has_one_digest():
    plan = StepPlan.from_rollout(np.array([0.0, 1.0]), None, 1)
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan and hash(again) == hash(plan) and again.digest() == plan.digest()
    with pytest.raises(AttributeError):
        plan.ranks = ()  # type: ignore[misc]
    assert StepPlan.from_rollout(np.array([0.0, 0.0]), None, 1).digest() != plan.digest()
    # Pinned: ranks on different machines compare it.
    assert plan.digest() == DIGEST


DIGEST = "d00e02d6f0e48b2c6025e69c0520d46a7bd63163ff06200e14a699429f2833a6"


def test_agree_keeps_live_what_is_live_elsewhere():
    plan = StepPlan.from_rollout(np.array([0.0, 0.0, 1.0]), None, 1)
    agreed = plan.agree([True, False, True])
    assert dead_flags(agreed) == [True, False, False]
    assert "live on another rank" in agreed.ranks[0][1].reason
    with pytest.raises(PlanError, match="2 flags, rank 0 has 3 microbatches"):
        plan.agree([True, False])
