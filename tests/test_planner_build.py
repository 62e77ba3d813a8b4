"""Packing: every sequence once, budgets kept, dead flags right, whatever the limits; and what the plan reports."""

import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gradprune.errors import PlanError
from gradprune.memory import ActivationMemory
from gradprune.planner import StepPlan


def build(lengths, advantages, **limits) -> StepPlan:
    return StepPlan.build(lengths, advantages, **{"token_budget": 64, "ranks": 2, **limits})


def quadratic(lengths):
    return 50.0 * lengths + lengths.astype(float) ** 2


@st.composite
def rollouts(draw):
    """Groups of 4: lengths up to 32, and whether each group is dead."""
    groups = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(1, 32), min_size=4 * groups, max_size=4 * groups))
    dead = np.repeat(draw(st.lists(st.booleans(), min_size=groups, max_size=groups)), 4)
    return np.array(lengths), np.where(dead, 0.0, 1.0 + np.arange(4 * groups)), dead


LIMITS = st.fixed_dictionaries(
    {"ranks": st.integers(1, 5), "token_budget": st.sampled_from([32, 50, 200])},
    optional={
        "lockstep": st.booleans(),
        "padded": st.booleans(),
        "multiple_of": st.integers(1, 3),
        "context_parallel": st.sampled_from([1, 2]),
        "dead_token_budget": st.sampled_from([32, 400]),
        "recompute": st.booleans(),
        "reuse_forward": st.booleans(),
        "steps": st.sampled_from([1, 2, 4]),
        "cost": st.sampled_from([quadratic, lambda lengths: lengths * 0.0]),
    },
)


def check(plan: StepPlan, lengths, dead, limits) -> None:
    """What holds of every plan."""
    listed = sorted(row for item in plan.microbatches for row in item.samples)
    assert listed == list(range(len(lengths)))
    assert len(plan.ranks) == limits["ranks"] and all(plan.ranks)
    parallel = limits.get("context_parallel", 1)
    quantum = 1 if parallel == 1 else 2 * parallel
    for rank in plan.ranks:
        for item in rank:
            rows = list(item.samples)
            assert item.filler == (not rows)
            padded = -(-lengths[rows] // quantum) * quantum
            tokens = quantum if item.filler else len(rows) * padded.max() if limits.get("padded") else padded.sum()
            assert item.tokens == tokens and item.padding == tokens - lengths[rows].sum()
            budget = limits["token_budget"]
            if item.dead:
                budget = max(budget, limits.get("dead_token_budget", budget))
            assert tokens <= budget * parallel or "microbatch_size" in limits
            assert not item.dead or dead[rows].all()
    for step in plan.steps:
        check_step(step, dead, limits)
        rows = [row for item in step.microbatches for row in item.samples]
        assert step.dead_row_tokens == lengths[rows][dead[rows]].sum()
    assert sum(step.dead_row_tokens for step in plan.steps) == plan.dead_row_tokens


def check_step(step: StepPlan, dead, limits) -> None:
    counts = {len(rank) for rank in step.ranks}
    assert all(count % limits.get("multiple_of", 1) == 0 for count in counts)
    for rank in step.ranks:
        assert [item.index for item in rank] == list(range(len(rank)))
        assert rank[-1].dead == all(item.dead for item in rank)
        assert [(not item.dead, not item.filler) for item in rank] == sorted(
            (not item.dead, not item.filler) for item in rank
        )
    if limits.get("lockstep"):
        assert len(counts) == 1
        assert all(len({item.dead for item in index}) == 1 for index in zip(*step.ranks))
    elif "num_microbatches" not in limits and "microbatch_size" not in limits:
        assert all(item.dead == bool(dead[list(item.samples)].all()) for item in step.microbatches)
        assert all(item.dead or not dead[list(item.samples)].any() for item in step.microbatches)


@settings(max_examples=150, deadline=None)
@given(rollouts(), LIMITS)
def test_every_sequence_is_in_exactly_one_microbatch(rollout, limits):
    lengths, advantages, dead = rollout
    assume(len(lengths) % limits.get("steps", 1) == 0)
    plan = StepPlan.build(lengths, advantages, **limits)
    check(plan, lengths, dead, limits)
    again = StepPlan.build(lengths, advantages, **limits)
    assert again == plan and again.digest() == plan.digest()
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan.balance is not None and plan.balance.slowest >= plan.balance.bound * (1 - 1e-12)
    assert plan.balance.waiting >= plan.balance.slowest * (1 - 1e-12)


@settings(max_examples=60, deadline=None)
@given(rollouts(), LIMITS, st.integers(1, 6))
def test_fixed_number_of_microbatches(rollout, limits, count):
    lengths, advantages, dead = rollout
    limits = {**limits, "num_microbatches": count * limits.get("multiple_of", 1)}
    assume(len(lengths) % limits.get("steps", 1) == 0)
    try:
        plan = StepPlan.build(lengths, advantages, **limits)
    except PlanError as error:
        assert "pass num_microbatches=" in str(error)
        return
    check(plan, lengths, dead, limits)
    assert all(len(rank) == limits["num_microbatches"] for step in plan.steps for rank in step.ranks)


@settings(max_examples=60, deadline=None)
@given(rollouts(), LIMITS, st.sampled_from([1, 2, 4]))
def test_fixed_microbatch_size(rollout, limits, size):
    lengths, advantages, dead = rollout
    limits = {**limits, "token_budget": 10**4, "microbatch_size": size, "dead_token_budget": 10**4}
    assume(len(lengths) // limits.get("steps", 1) % size == 0)
    plan = StepPlan.build(lengths, advantages, **limits)
    check(plan, lengths, dead, limits)
    assert all(item.filler or len(item.samples) == size for item in plan.microbatches)
    for step in plan.steps:
        mixed = [item for item in step.microbatches if len(set(dead[list(item.samples)])) == 2]
        assert len(mixed) <= size - 1  # the last live microbatch is filled up with dead rows, wherever they land


@settings(max_examples=60, deadline=None)
@given(rollouts(), LIMITS)
def test_groups_kept_whole(rollout, limits):
    lengths, advantages, dead = rollout
    limits = {**limits, "token_budget": 128, "dead_token_budget": 128}
    assume(len(lengths) // 4 % limits.get("steps", 1) == 0)
    plan = StepPlan.build(lengths, advantages, group_size=4, keep_groups=True, **limits)
    check(plan, lengths, dead, limits)
    home = {
        row: (rank, item.step, item.index)
        for rank, items in enumerate(plan.ranks)
        for item in items
        for row in item.samples
    }
    assert all(len({home[row] for row in range(first, first + 4)}) == 1 for first in range(0, len(lengths), 4))


def heavy_tailed(sequences: int, dead_share: float = 0.6, group_size: int = 8):
    rng = np.random.default_rng(sequences)
    lengths = np.clip(rng.lognormal(6.8, 0.9, sequences), 16, 8192).astype(int)
    dead = np.repeat(rng.random(sequences // group_size) < dead_share, group_size)
    return lengths, np.where(dead, 0.0, rng.standard_normal(sequences))


@pytest.mark.parametrize(("per_rank", "goal"), [(8, 1.05), (16, 1.05), (32, 1.05), (64, 1.01), (256, 1.01)])
@pytest.mark.parametrize("ranks", [4, 64])
@pytest.mark.parametrize("dead_share", [0.3, 0.6, 0.9])
def test_slowest_rank_is_near_the_bound(per_rank, goal, ranks, dead_share):
    lengths, advantages = heavy_tailed(per_rank * ranks, dead_share)
    plan = build(lengths, advantages, ranks=ranks, token_budget=16384, cost=quadratic)
    assert plan.balance is not None and plan.balance.slowest <= goal * plan.balance.bound


def test_prunes_every_dead_token_with_eight_sequences_a_pack():
    lengths, advantages = heavy_tailed(1024)
    plan = build(lengths, advantages, ranks=4, token_budget=None, microbatch_size=8)
    pruned = sum(int(lengths[list(item.samples)].sum()) for item in plan.microbatches if item.dead)
    assert pruned >= 0.97 * plan.dead_row_tokens > 0


def test_digest_is_pinned():
    """Integer lengths, integer decisions: this digest is the same on every machine."""
    lengths = np.arange(1, 257) * 7 % 61 + 1
    plan = build(lengths, np.arange(256) // 8 % 3, ranks=4, cost=quadratic)
    assert plan.digest() == DIGEST


DIGEST = "1c87c6410a849c57547bce7cc5169835ae4ffd073cba726677fc300be3ab8f7b"


def test_lockstep_reports_what_agreement_costs():
    """One rank's worth of live sequences and a fixed size: 3 live pairs on 2 ranks leave one index half dead."""
    plan = build(
        np.full(8, 10),
        np.array([1.0] * 6 + [0.0] * 2),
        token_budget=None,
        microbatch_size=2,
        num_microbatches=2,
        lockstep=True,
    )
    assert plan.balance is not None and plan.balance.kept_live == 1
    assert "1 dead microbatches kept live" in str(plan)
    kept = [item for item in plan.microbatches if "live on another rank" in item.reason]
    assert len(kept) == 1 and not kept[0].dead


def test_keeps_live_what_only_one_rank_calls_dead():
    """One live sequence, two ranks in lockstep: the other rank's filler runs live at the same index."""
    plan = build([5, 5, 5], [0.0, 0.0, 1.0], lockstep=True)
    assert [[item.dead for item in rank] for rank in plan.ranks] == [[True, False]] * 2
    fillers = [item for item in plan.microbatches if item.filler]
    assert [(item.tokens, item.dead) for item in fillers] == [(1, False)]


def test_lockstep_splits_packs_before_it_fills():
    """Unequal counts are met by splitting a pack where one has two sequences: no filler here, and little waiting."""
    lengths, advantages = heavy_tailed(384)
    limits = {"ranks": 8, "token_budget": 12288, "cost": lambda lengths: 16384.0 * lengths + lengths**2}
    free, plan = build(lengths, advantages, **limits), build(lengths, advantages, lockstep=True, **limits)
    assert len({tuple(item.dead for item in rank) for rank in free.ranks}) > 1, "the input should need lockstep"
    assert plan.balance is not None and plan.balance.fillers == 0
    assert plan.balance.waiting <= 1.02 * plan.balance.slowest


def test_a_dead_pack_that_runs_live_keeps_to_the_live_budget():
    """28 live rows of 1 and 4 dead rows of up to 9 on two ranks in lockstep, one microbatch each: the dead ones have to
    run live, and their rectangle of 36 tokens is too large for that."""
    rollout = {"lengths": [1] * 28 + [9, 1, 1, 1], "advantages": [1.0] * 28 + [0.0] * 4}
    limits = {"padded": True, "lockstep": True, "dead_token_budget": 400}
    plan = build(**rollout, **limits, token_budget=36, num_microbatches=1)
    assert [(item.dead, item.tokens) for item in plan.microbatches] in (
        [(False, 28), (False, 36)],
        [(False, 36), (False, 28)],
    )
    with pytest.raises(PlanError, match="make 3 microbatches for 2 ranks: pass num_microbatches=2"):
        build(**rollout, **limits, token_budget=32, num_microbatches=1)


def test_fewer_sequences_than_ranks_gives_dead_fillers_of_one_token():
    plan = build([5, 7], [1.0, 0.0], ranks=4)
    fillers = [item for item in plan.microbatches if item.filler]
    assert len(fillers) == 2 and all(item.dead and item.tokens == 1 and not item.samples for item in fillers)


def test_dead_packs_use_their_own_budget():
    plan = build(np.full(16, 16), np.zeros(16), ranks=1, dead_token_budget=128)
    assert [item.tokens for item in plan.ranks[0]] == [128, 128]
    memory = ActivationMemory.of_transformer(layers=36, hidden=2560, vocabulary=151936)
    # Qwen3-4B: (36 * 34 * 2560 + 8 * 151936) / (34 * 2560 + 8 * 151936) = 3.34
    assert memory.dead_token_budget(16384) == int(16384 * memory.live / memory.dead) == 54703
    derived = build(np.full(16, 16), np.zeros(16), ranks=1, memory=memory)
    assert max(item.tokens for item in derived.ranks[0]) > 64


def test_snap_makes_uniform_groups_dead_and_says_so():
    advantages = torch.tensor([0.19] * 4 + [1.0, -1.0, 1.0, -1.0])
    rewards = [2.6] * 4 + [1.0, 0.0, 1.0, 0.0]
    kept = build(np.full(8, 8), advantages, group_size=4, rewards=rewards)
    assert kept.dead_row_tokens == 0 and [group.group for group in kept.uniform] == [0]
    plan = build(np.full(8, 8), advantages, groups=list("aaaabbbb"), rewards=rewards, snap_uniform=True)
    assert (
        plan.dead_row_tokens == 32 and plan.uniform[0].group == "a" and plan.uniform[0].residue == pytest.approx(0.19)
    )
    assert any("changes the gradient" in note.replace("\n", " ") for note in plan.notes)
    snapped = plan.snap(advantages)
    assert torch.equal(snapped, torch.tensor([0.0] * 4 + [1.0, -1.0, 1.0, -1.0])) and advantages[0] != 0
    assert kept.snap(advantages).equal(advantages)


def test_keeps_a_group_of_equal_advantages_and_unequal_rewards():
    plan = build(np.full(4, 8), [0.5] * 4, group_size=4, rewards=[1.0, 2.0, 1.0, 2.0], snap_uniform=True)
    assert plan.uniform == () and plan.dead_row_tokens == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [3, 65]}, "sequence 1 has 65 tokens, token_budget is 64"),
        (
            {"lengths": [3, 65], "advantages": [1, 0], "dead_token_budget": 32},
            "sequence 1 has 65.*dead_token_budget is 32",
        ),
        ({"lengths": [3, -1]}, r"lengths\[1\] is -1"),
        ({"lengths": [3, 1e300]}, r"lengths\[1\] is 1e\+300: .* at most 2147483647"),
        ({"lengths": np.array([3, 2**63], dtype=np.uint64)}, r"lengths\[1\] is 9223372036854775808"),
        ({"lengths": [3, 65], "steps": 2}, "sequence 1 has 65 tokens"),
        (
            {"lengths": [40, 3, 9, 40], "advantages": [1] * 4, "groups": [*"baab"], "keep_groups": True},
            "sequence 0, 2 seq",
        ),
        ({"lengths": [3, float("nan")]}, r"lengths\[1\] is nan"),
        ({"lengths": [3, 2.5]}, r"lengths\[1\] is 2.5"),
        ({"lengths": []}, "at least one"),
        ({"advantages": [1.0, float("nan")]}, r"advantages\[1\] is nan \(row 1\)"),
        ({"advantages": [1.0, 2.0, 3.0]}, "advantages has 3 rows, lengths has 2"),
        ({"advantages": torch.empty(2, device="meta")}, r"pass advantages\.cpu\(\)"),
        ({"group_size": 3}, "advantages has 2 rows, group_size is 3: pass whole groups, or group_size=2"),
        ({"keep_groups": True}, "keep_groups, snap_uniform and rewards need groups"),
        (
            {"lengths": [40, 40], "group_size": 2, "keep_groups": True},
            "the group of sequence 0, 2 sequences, has 80 tokens, token_budget is 64",
        ),
        ({"groups": [0]}, r"groups has shape \[1\]"),
        ({"groups": [0, 1], "group_size": 1}, "both group_size and groups"),
        ({"snap_uniform": True}, "snap_uniform and rewards need groups"),
        ({"rewards": [1.0], "group_size": 2}, r"rewards has shape \[1\]"),
        ({"ranks": 0}, "ranks is 0"),
        ({"ranks": 1.5}, "ranks is 1.5"),
        ({"ranks": float("nan")}, "ranks is nan"),
        ({"ranks": "4"}, "ranks is '4'"),
        ({"ranks": True}, "ranks is True"),
        ({"ranks": None}, "ranks is None"),
        ({"token_budget": float("inf")}, "token_budget is inf"),
        ({"dead_token_budget": [8]}, r"dead_token_budget is \[8\]"),
        ({"num_microbatches": 10**30}, "num_microbatches is 10.*at most 2147483647"),
        ({"multiple_of": None}, "multiple_of is None"),
        ({"group_size": "2"}, "group_size is '2'"),
        ({"groups": [0, None]}, r"groups\[1\] is None"),
        ({"groups": [float("nan"), 1]}, r"groups\[0\] is nan"),
        ({"rewards": [1.0, float("nan")], "group_size": 2}, r"rewards\[1\] is nan"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"steps": [0, 0.5]}, r"steps\[1\] is 0.5"),
        ({"steps": [0, float("nan")]}, r"steps\[1\] is nan"),
        ({"steps": [1, 1]}, "no sequence is in step 0"),
        ({"cost": 3}, "cost is a int: pass a callable"),
        (
            {"lengths": [1] * 3, "advantages": [1] * 3, "microbatch_size": 2, "groups": [0, 0, 1], "keep_groups": True},
            "that of sequence 0 has 2 sequences and that of sequence 2 has 1",
        ),
        ({"normaliser": "coupled"}, "couples rows.*from_rollout"),
        ({"normaliser": "coupled", "tier": "reordering"}, "couples rows.*from_rollout"),
        ({"token_budget": None}, "neither token_budget nor microbatch_size"),
        ({"lengths": [64, 64], "num_microbatches": 1, "ranks": 1}, "num_microbatches is 1, but rank 0 has 128.*=2"),
        ({"lengths": [64, 64], "num_microbatches": 1, "ranks": 1, "padded": True}, "make 2 microbatches for 1 ranks"),
        ({"num_microbatches": 3, "multiple_of": 2}, "pass a multiple of it"),
        (
            {"lengths": [1] * 3, "advantages": [1] * 3, "microbatch_size": 2},
            "3 sequences do not fill.*microbatch_size=3",
        ),
        ({"microbatch_size": 1, "num_microbatches": 2}, "2 sequences are 2 microbatches of 1, but 2 ranks with"),
        ({"lengths": [40, 40], "microbatch_size": 2}, "gives a microbatch of 80 tokens, token_budget is 64"),
        ({"microbatch_size": 1, "group_size": 2, "keep_groups": True}, "pass a multiple of 2"),
        ({"steps": 3}, "2 sequences do not split into 3.*steps=2"),
        ({"steps": [0, 2]}, "without a gap"),
        ({"steps": 2, "group_size": 2, "keep_groups": True}, "sequence 1 and its group fall into different"),
        ({"cost": lambda lengths: lengths[:1]}, r"cost\(lengths\) has shape \[1\]"),
        ({"cost": lambda lengths: lengths * np.nan}, r"cost\(lengths\) is nan for sequence 0 of 8 tokens"),
        ({"rows_coupled": True}, "couples rows.*from_rollout"),
        ({"normaliser": "microbatch"}, 'tier="reordering"'),
        ({"normaliser": "sometimes"}, "pass one of 'global', 'microbatch', 'coupled'"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(PlanError, match=message):
        build(**{"lengths": [8, 9], "advantages": [1.0, 2.0], **arguments})


def test_counts_may_be_any_whole_numbers():
    limits = {"token_budget": 64, "ranks": 2, "multiple_of": 2, "microbatch_size": 1, "context_parallel": 2}
    expected = build([8, 9, 3, 4], [1.0, 0.0, 1.0, 0.0], steps=2, **limits)
    for kind in (float, np.float32, np.int16, torch.tensor):
        given = {name: kind(value) for name, value in limits.items()}
        plan = build([8, 9, 3, 4], [1.0, 0.0, 1.0, 0.0], steps=kind(2), group_size=kind(2), **given)
        assert plan == expected and all(type(item.tokens) is int for item in plan.microbatches)


def test_groups_may_be_named_by_any_objects():
    ids = [Fraction(1, 3), Fraction(1, 3), Fraction(1, 2), Fraction(1, 2)]
    plan = build([8] * 4, [0.19, 0.19, 1.0, -1.0], groups=ids)
    assert [group.group for group in plan.uniform] == [Fraction(1, 3)]


def test_repacks_a_microbatch_normaliser_only_in_the_reordering_tier():
    plan = build([8, 9], [1.0, 0.0], normaliser="microbatch", tier="reordering")
    assert any("divides by a number of its microbatch" in note for note in plan.notes)
    assert any("nobody said" in note for note in build([8, 9], [1.0, 0.0]).notes)
    assert build([8, 9], [1.0, 0.0], normaliser="global").notes == ()


def test_each_step_has_its_own_account():
    """Two steps on two ranks: 12 live and 4 dead tokens, then 8 dead ones; a live token takes three forwards."""
    plan = build([6, 6, 4, 8], [1.0, 1.0, 0.0, 0.0], ranks=2, steps=[0, 0, 0, 1])
    first, second = plan.steps
    assert (first.dead_row_tokens, second.dead_row_tokens, plan.dead_row_tokens) == (4, 8, 12)
    assert first.balance is not None and (first.balance.slowest, first.balance.mean) == (22.0, 20.0)
    assert second.balance is not None and (second.balance.slowest, second.balance.mean) == (8.0, 4.0)
    assert plan.balance is not None and plan.balance.slowest == 30.0
    assert "9 of 9 tokens in dead microbatches (100.0%); 8 belong to dead rows" in str(second)
    assert build([6], [1.0]).steps == (build([6], [1.0]),)


def test_a_step_lists_its_own_uniform_groups():
    plan = build(np.full(8, 8), [0.19] * 4 + [0.3] * 4, group_size=4, steps=2)
    assert [[group.group for group in step.uniform] for step in plan.steps] == [[0], [1]]


def test_prints_a_table():
    text = str(build(np.full(200, 32), np.tile([0.0, 1.0], 100), ranks=2))
    assert "of the lower bound" in text and "... and 36 more" in text
