"""Ranks agree on a plan once a rollout, on the CPU: same data, same plan; shared collectives, one decision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

import gradprune
import gradprune.megatron
from tests.megatron.layouts import Layout, build
from tests.megatron.matrix import EXPERTS
from tests.megatron.world import RankError

TP = Layout("TP2", 2, tp=2)
DP = Layout("DP2", 2)
EP = Layout("EP2", 2, ep=2, config=EXPERTS)


@contextmanager
def attached(layout: Layout) -> Iterator[Any]:
    trainee = build(layout)
    try:
        with gradprune.megatron.attach(trainee.chunks, trainee.config) as schedule:
            yield schedule
    finally:
        parallel_state.destroy_model_parallel()


def make_plan(dead: str, rows: int = 8) -> gradprune.StepPlan:
    """`dead`: a digit for each microbatch of two rows, 1 where it is dead."""
    advantages = torch.tensor([0.0 if flag == "1" else 1.0 for flag in dead for _ in range(2)])
    return gradprune.StepPlan.from_rollout(advantages, torch.ones(len(advantages), 4), 2)


def flags(plan: gradprune.StepPlan, rank: int = 0) -> str:
    return "".join("1" if item.dead else "0" for item in plan.ranks[rank])


def agree(layout: Layout, plans: list[str]) -> tuple[str, tuple[str, ...]]:
    with attached(layout) as schedule:
        plan, _ = schedule.agree(make_plan(plans[dist.get_rank()]), True)
        return flags(plan), plan.notes


def agree_for_all(layout: Layout, plans: list[str], other: int | None = None) -> list[str]:
    """One plan of all data ranks; rank `other` holds one with another first rank."""
    parts = [make_plan(text) for text in plans]
    plan = replace(parts[0], ranks=tuple(part.ranks[0] for part in parts))
    if dist.get_rank() == other:
        plan = replace(plan, ranks=(make_plan("1111").ranks[0], *plan.ranks[1:]))
    with attached(layout) as schedule:
        agreed, _ = schedule.agree(plan, True)
        return [flags(agreed, rank) for rank in range(len(plans))]


def objections(layout: Layout) -> tuple[str | None, str | None, str | None]:
    with attached(layout) as schedule:
        plan = make_plan("1010")
        agreed, _ = schedule.agree(plan, True)
        return tuple(schedule.objection(item) for item in (agreed.ranks[0][0], make_plan("1010").ranks[0][0], None))


def proofs(layout: Layout, proved: list[bool]) -> bool:
    with attached(layout) as schedule:
        return schedule.agree(make_plan("1010"), proved[dist.get_rank()])[1]


@pytest.mark.timeout(120)
def test_prunes_on_expert_ranks_what_is_dead_on_both(worlds):
    (first, notes), (second, _) = worlds(2).run(agree, EP, ["1101", "1011"])
    assert first == second == "1001"
    assert notes == (
        "1 of 3 dead microbatches (8 tokens) run live, because ranks with which they share collectives in the backward "
        "have them live",
    )


@pytest.mark.timeout(120)
def test_keeps_data_parallel_ranks_apart(worlds):
    (first, notes), (second, _) = worlds(2).run(agree, DP, ["1101", "1011"])
    assert (first, second, notes) == ("1101", "1011", ())


@pytest.mark.timeout(120)
def test_prunes_by_one_plan_for_all_ranks(worlds):
    assert worlds(2).run(agree_for_all, EP, ["1101", "1011"]) == [["1001", "1001"]] * 2
    assert worlds(2).run(agree_for_all, DP, ["1101", "1011"]) == [["1101", "1011"]] * 2


@pytest.mark.timeout(120)
def test_keeps_live_without_agreement(worlds):
    for agreed, other, unplanned in worlds(2).run(objections, TP):
        assert agreed is None
        assert "call plan = step.agree(plan)" in other and other == unplanned
    assert worlds(2).run(objections, DP) == [(None, None, None)] * 2  # their backwards wait for nobody


@pytest.mark.timeout(120)
def test_stages_prune_only_if_the_last_one_has_a_proof(worlds):
    pipeline = Layout("PP2", 2, pp=2)
    assert worlds(2).run(proofs, pipeline, [False, True]) == [True, True]
    assert worlds(2).run(proofs, pipeline, [True, False]) == [False, False]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("layout", "function", "args", "message"),
    [
        (TP, agree, (["1010", "1000"],), "the first difference is microbatch 2 (dead on 0, live on 1)"),
        (TP, agree, (["1010", "101"],), "4 and 3 microbatches"),
        (EP, agree, (["1010", "101"],), "share collectives in their backward and have 4 and 3 microbatches"),
        (DP, agree_for_all, (["1010", "1010", "1010"],), "holds a plan for 3 ranks, there are 2"),
        (DP, agree_for_all, (["1010", "1010"], 1), "ranks 0 and 1 hold different plans for all ranks"),
    ],
)
def test_disagreement_is_an_error_on_every_rank(worlds, layout, function, args, message):
    with pytest.raises(RankError) as caught:
        worlds(2).run(function, layout, *args, grace=20.0)
    assert caught.value.kinds == {0: "PlanError", 1: "PlanError"}
    assert message in str(caught.value)
