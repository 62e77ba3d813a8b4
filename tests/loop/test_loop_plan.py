"""A loop over a bound plan does what the plan says, also where its body moves the batch elsewhere first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradprune
from gradprune.facts import Live
from tests.loop.arms import ZERO, Training, batch_loss, make_batches
from tests.step.arms import TinyModel


def over_items(t: Training, batches: Any) -> None:
    for index, batch in enumerate(batches):
        batch = {name: tensor.clone() for name, tensor in batch.items()}
        loss = batch_loss(t.model, batch)
        (loss / (index + 1)).backward()


def over_iterator(t: Training, batches: Any) -> None:
    while batches.upcoming is not None:
        batch = next(batches)
        loss = batch_loss(t.model, batch)
        loss.backward()


def plan_of(batches: list[Any], dead: list[bool]) -> gradprune.StepPlan:
    """A plan that says dead of each microbatch as it is told."""
    rows = [len(batch["adv"]) for batch in batches]
    advantages = torch.cat([torch.zeros(n) if flag else torch.ones(n) for n, flag in zip(rows, dead)])
    return gradprune.StepPlan.from_rollout(advantages, None, rows)


@pytest.mark.parametrize("loop", [over_items, over_iterator])
def test_plan_is_honoured(loop: Any) -> None:
    """The plan calls one of the dead microbatches live: nothing is read from the batch then, and it runs live."""
    model = TinyModel(width=4)
    t = Training(model, torch.optim.SGD(model.parameters(), lr=0.1), make_batches("ddl"), [])
    decorated = gradprune.grpo_loop(ZERO, strict=True)(loop)
    decorated(t, plan_of(t.batches, [True, False, False]).bind(t.batches))
    first, second, third = (decision.outcome for decision in decorated.explain().decisions)
    assert not first and first.reason == "advantages == 0 in all 3 rows"
    assert isinstance(second, Live) and second.reason == "planned live: advantages != 0 in row 3"
    assert isinstance(third, Live) and third.reason == "planned live: advantages != 0 in row 6"


def test_no_plan_reads_the_batch() -> None:
    model = TinyModel(width=4)
    t = Training(model, torch.optim.SGD(model.parameters(), lr=0.1), make_batches("dl"), [])
    decorated = gradprune.grpo_loop(ZERO, strict=True)(over_items)
    decorated(t, t.batches)
    assert [bool(decision.outcome) for decision in decorated.explain().decisions] == [False, True]
    assert decorated.explain().decisions[0].outcome.reason == "batch.adv * batch.mask == 0 at every position"
