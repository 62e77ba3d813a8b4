"""What goes wrong in real runs: each behaves as without gradprune, or is a clear error on every rank, in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

import gradprune
import gradprune.megatron
from gradprune.errors import PlanError, StalePlanError
from tests.megatron.arms import bind, compare_arms, forward_backward, parse_dead
from tests.megatron.layouts import ROWS, Layout, Trainee, build, make_batches, make_forward_step
from tests.megatron.matrix import OVERLAP
from tests.megatron.world import RankError

ONE = Layout("1 rank")
DP_OVERLAP = Layout("DP2, overlap", 2, ddp=OVERLAP)
PIPELINE = Layout("PP2", 2, pp=2)


@contextmanager
def compiled(layout: Layout, inside: Callable[[int], None] = lambda index: None) -> Iterator[tuple[Trainee, Any]]:
    """A trainee with a compiled step that calls ``inside(count)`` in its forward_step."""
    trainee, plain, calls = build(layout), make_forward_step(layout), iter(range(10_000))

    def forward_step(data_iterator: Any, model: torch.nn.Module) -> Any:
        inside(next(calls))
        return plain(data_iterator, model)

    try:
        with gradprune.megatron.attach(trainee.chunks, trainee.config) as schedule:
            yield trainee, gradprune.compile(forward_step, zero="advantages * loss_mask", schedule=schedule)
    finally:
        parallel_state.destroy_model_parallel()


def plan_of(batches: list[Any]) -> gradprune.StepPlan:
    rows = [torch.cat([batch[name] for batch in batches]) for name in ("advantages", "loss_mask")]
    return gradprune.StepPlan.from_rollout(*rows, ROWS)


def step_raises(layout: Layout, rank: int) -> str:
    """On `rank` the third forward_step raises; afterwards everything is as it was, and a whole step runs."""

    def inside(index: int) -> None:
        if index == 2 and dist.get_rank() == rank:
            raise KeyboardInterrupt("stopped by hand")

    with compiled(layout, inside) as (trainee, step):
        batches = make_batches(0, {0, 2})
        owner = trainee.chunks[0].module
        with pytest.raises(KeyboardInterrupt):
            forward_backward(layout, trainee, step, bind(layout, step, batches))
        assert torch.is_grad_enabled()
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in owner.modules())
        for chunk in trainee.chunks:
            chunk.zero_grad_buffer()
        forward_backward(layout, trainee, step, bind(layout, step, batches))
        return str(step.explain())


def step_raises_on_one_rank(layout: Layout) -> None:
    def inside(index: int) -> None:
        if index == 2 and dist.get_rank() == 1:
            raise ValueError("a bad sample on rank 1")

    with compiled(layout, inside) as (trainee, step):
        forward_backward(layout, trainee, step, bind(layout, step, make_batches(0, {0, 2})))


def plan_of_other_data(layout: Layout) -> None:
    with compiled(layout) as (trainee, step):
        plan = step.agree(plan_of(make_batches(0, {0, 2})))
        with pytest.raises(StalePlanError, match="microbatch 0 is planned dead"):
            forward_backward(layout, trainee, step, [plan.bind(make_batches(1, set()))])


def iterator_ends_early(layout: Layout) -> None:
    with compiled(layout) as (trainee, step):
        batches = make_batches(0, {0, 2})
        plan = step.agree(plan_of(batches))
        with pytest.raises(PlanError, match="4 microbatches, the iterator ended after 3"):
            forward_backward(layout, trainee, step, [plan.bind(iter(batches[:3]))])


def one_rank_reads(layout: Layout) -> None:
    """The first tensor-parallel rank reads the data and sends it to the other, as in Megatron-LM."""
    with compiled(layout) as (trainee, step):
        batches = make_batches(0, {0, 2})
        plan = step.agree(plan_of(batches))
        reads = dist.get_rank() == 0
        forward_backward(layout, trainee, step, [plan.bind(batches if reads else None)])


def evaluate(layout: Layout, no_grad: bool) -> tuple[list[float], list[float], int]:
    """forward_only losses of the plain and the compiled step, and how many of its microbatches were dead."""
    with compiled(layout) as (trainee, step), torch.set_grad_enabled(not no_grad):
        batches = make_batches(0, {0, 2})
        plain = forward_backward(layout, trainee, make_forward_step(layout), [iter(batches)], forward_only=True)
        ours = forward_backward(layout, trainee, step, bind(layout, step, batches), forward_only=True)
        assert all(not parameter.main_grad.any() for parameter in trainee.chunks[0].module.parameters())
        dead = sum(not decision.outcome for decision in step.explain().decisions)
        return [row["loss"].item() for row in plain], [row["loss"].item() for row in ours], dead


@pytest.mark.timeout(120)
def test_interrupt_restores_everything(worlds):
    (text,) = worlds(1).run(step_raises, ONE, 0)
    assert "dead" in text


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", [plan_of_other_data, iterator_ends_early], ids=lambda fault: fault.__name__)
def test_wrong_data_is_an_error(worlds, fault):
    worlds(1).run(fault, ONE)


@pytest.mark.timeout(120)
def test_rank_without_data_of_its_own_is_an_error(worlds):
    with pytest.raises(RankError, match="was given no data on a rank that computes the loss") as caught:
        worlds(2).run(one_rank_reads, Layout("TP2", 2, tp=2))
    assert caught.value.kinds[1] == "PruneError"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("no_grad", [True, False])
def test_forward_only_evaluates(worlds, no_grad):
    ((plain, ours, dead),) = worlds(1).run(evaluate, ONE, no_grad)
    assert plain == ours and len(plain) == 4
    assert not (no_grad and dead)


@pytest.mark.timeout(120)
def test_forward_only_evaluates_in_a_pipeline(worlds):
    (first, _, _), (plain, ours, _) = worlds(2).run(evaluate, PIPELINE, True)
    assert first == [] and plain == ours and len(plain) == 4


@pytest.mark.timeout(120)
def test_skipped_step_equals(worlds):
    dead = parse_dead("0|1;3|0,3;|2;3|3")
    outcomes = worlds(2).run(compare_arms, DP_OVERLAP, dead, (), (1, 2))
    assert not any(outcome.differences for outcome in outcomes)
    assert [outcome.dead for outcome in outcomes] == [2, 4]  # all but the first step's


@pytest.mark.timeout(120)
def test_resumed_run_equals(worlds):
    dead = parse_dead("0|1;3|0,3;1|2;3|3")
    outcomes = worlds(2).run(compare_arms, DP_OVERLAP, dead, (), (), 2)
    assert not any(outcome.differences for outcome in outcomes)
    assert [outcome.dead for outcome in outcomes] == [2, 3]  # step 0 and, after the restart, step 2 run live


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_error_on_one_rank_ends_all(worlds):
    # As without gradprune: the rank that raised says why, the other gives up waiting for it.
    with pytest.raises(RankError, match="a bad sample on rank 1") as caught:
        worlds(2).run(step_raises_on_one_rank, DP_OVERLAP, limit=100, grace=80)
    assert caught.value.kinds[1] == "ValueError" and caught.value.kinds[0] != "Timeout"
