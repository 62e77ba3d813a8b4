"""Pruned and unpruned training agree in every bit, and the pruned arm really is pruned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.step.arms import assert_equal, make_batch, outcomes, train
from tests.step.losses import LIVE, POLICY, SELECT, Loss, by_product, grpo


def updates_of(pattern: list[list[bool]], rows: int, tokens: list[int], off_policy: float) -> list[list[dict]]:
    return [
        [
            make_batch(rows, tokens[(u + m) % len(tokens)], dead=dead, seed=100 * u + m, off_policy=off_policy)
            for m, dead in enumerate(microbatches)
        ]
        for u, microbatches in enumerate(pattern)
    ]


def expected_outcomes(pattern: list[list[bool]]) -> str:
    return "".join("d" if dead else "l" for microbatches in pattern for dead in microbatches)


PATTERN = [[True, False, True], [True, True, True], [False, False, True]]


@pytest.mark.parametrize("select", SELECT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("policy", POLICY, ids=lambda f: f.__name__)
def test_prunes_policy_loss(policy, select):
    updates = updates_of(PATTERN, 4, [6, 9], 0.3)
    pruned = train(Loss(policy, select), updates, compiled=True)
    assert outcomes(pruned) == expected_outcomes(PATTERN)
    assert_equal(pruned, train(Loss(policy, select), updates, compiled=False))


@pytest.mark.parametrize("extra", LIVE, ids=lambda f: f.__name__)
def test_keeps_live_term(extra):
    updates = updates_of(PATTERN, 4, [6], 0.3)
    loss = Loss(grpo, by_product, extra)
    with pytest.warns(gradprune_warning()):
        kept = train(loss, updates, compiled=True)
    assert outcomes(kept) == "l" * 9
    assert_equal(kept, train(loss, updates, compiled=False))


def gradprune_warning() -> type[Warning]:
    from gradprune.errors import NoEffectWarning

    return NoEffectWarning


def test_keeps_advantage_shifted_against_mask():
    def shifted(model, batch):
        logp = torch.log_softmax(model(batch["ids"])[:, :-1], -1)[..., 0]
        adv = batch["adv"][:, None].expand_as(logp)
        return -(logp[:-1] * adv[:-1] * batch["mask"][1:]).sum(), {}

    updates = updates_of(PATTERN, 4, [6], 0.3)
    with pytest.warns(gradprune_warning()):
        kept = train(shifted, updates, compiled=True)
    assert outcomes(kept) == "l" * 9
    assert_equal(kept, train(shifted, updates, compiled=False))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    pattern=st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=3),
    rows=st.integers(1, 5),
    tokens=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    policy=st.sampled_from(POLICY),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    off_policy=st.sampled_from([0.0, 0.5]),
    plan=st.booleans(),
)
def test_prunes_random_orders(pattern, rows, tokens, policy, dtype, off_policy, plan):
    rows = max(rows, 2)  # batch norm wants more than one value a channel
    updates = updates_of(pattern, rows, tokens, off_policy)
    pruned = train(Loss(policy), updates, compiled=True, dtype=dtype, plan=plan)
    assert outcomes(pruned) == expected_outcomes(pattern)
    assert_equal(pruned, train(Loss(policy), updates, compiled=False, dtype=dtype))


def test_prunes_zero_variance_groups():
    """Advantages as a trainer makes them: rewards minus the group's mean, over the group's deviation."""
    rewards = torch.tensor([[1.0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    batches = [make_batch(4, 5, dead=False, seed=i) | {"adv": advantages[i]} for i in range(3)]
    pruned = train(Loss(grpo), [batches], compiled=True, plan=True)
    assert outcomes(pruned) == "dld"
    assert_equal(pruned, train(Loss(grpo), [batches], compiled=False))


def test_keeps_microbatch_that_is_dead_only_for_a_second_step():
    """The comparison can fail: a step that is wrongly cut off from its graph trains to other parameters."""
    updates = updates_of([[False, False]], 4, [6], 0.3)
    wrong = train(lambda model, batch: (Loss(grpo)(model, batch)[0] * 0, {}), updates, compiled=False)
    right = train(lambda model, batch: (Loss(grpo)(model, batch)[0], {}), updates, compiled=False)
    with pytest.raises(AssertionError, match="differs"):
        assert_equal(wrong, right)
