"""Live microbatches of a known kind are only booked: as all others are, and nothing else is done to them."""

from __future__ import annotations

import pytest
import torch

import gradprune
from gradprune.errors import PruneError
from tests.step.arms import TinyModel, bound, make_batch
from tests.step.losses import Loss, grpo

ROWS = (4, 4, 4, 4, 4, 2, 2, 2)
DEAD = (False, False, True, False, True, False, False, False)


class Other(dict):
    """A batch that is no plain dict, so that its microbatch is no routine."""


def run(kind):
    model, step = TinyModel(), gradprune.compile(Loss(grpo), zero="adv * mask")
    for _ in range(2):
        data = [kind(make_batch(rows, 6, dead=dead, seed=i)) for i, (rows, dead) in enumerate(zip(ROWS, DEAD))]
        for batch in bound(data):
            step(model, batch)[0].backward()
    return step


def routine(step):
    return step._routine._kinds


def test_is_booked_like_any_other():
    short, long = run(dict), run(Other)
    assert len(routine(short)) == 2 and not routine(long)
    assert short.explain().decisions == long.explain().decisions
    assert short.report() == long.report()
    assert [bool(decision.outcome) for decision in short.explain().decisions] == [not dead for dead in DEAD] * 2


def test_leaves_the_step_alone():
    made = []

    def forward_step(iterator, model):
        batch = next(iterator)
        made.append((model(batch["ids"]), lambda output: Loss(grpo)(lambda ids: output, batch)))
        return made[-1]

    model, step = TinyModel(), gradprune.compile(forward_step, zero="adv * mask")
    iterator = bound([make_batch(4, 6, dead=False, seed=seed) for seed in range(3)])
    same = []
    for _ in range(3):
        output, loss_func = step(iterator, model)
        loss_func(output)[0].backward()
        same.append(loss_func is made[-1][1])
    assert same == [False, True, True]  # the first is counted


@pytest.mark.parametrize("rows, training, kinds", [(4, True, 1), (2, True, 2), (4, False, 2)])
def test_a_kind_is_shapes_and_mode(rows, training, kinds):
    model, step = TinyModel(), gradprune.compile(Loss(grpo), zero="adv * mask")
    for each, mode in ((4, True), (4, True), (rows, training), (rows, training)):
        model.train(mode)
        for batch in bound([make_batch(each, 6, dead=False, seed=0)]):
            step(model, batch)[0].backward()
    assert len(routine(step)) == kinds


def test_a_batch_without_a_factor_is_an_error():
    model, step = TinyModel(), gradprune.compile(Loss(grpo), zero="adv * mask")
    good = [make_batch(4, 6, dead=False, seed=seed) for seed in range(2)]
    for batch in bound(good):
        step(model, batch)[0].backward()
    assert routine(step)
    with pytest.raises(PruneError, match="no 'mask'"):
        for batch in bound(good):
            mask = batch.pop("mask")
            try:
                step(model, batch)
            finally:
                batch["mask"] = mask


def test_what_a_plan_calls_live_runs_live_whatever_it_is():
    """A plan may be of other data: live is always right."""
    model, step = TinyModel(), gradprune.compile(Loss(grpo), zero="adv * mask")
    live, dead = (make_batch(4, 6, dead=flag, seed=0) for flag in (False, True))
    gradients = []
    for batch in bound([live] * 3):
        kept = dict(batch)
        batch.update(dead)
        loss = step(model, batch)[0]
        gradients.append(torch.autograd.grad(loss, model.head.weight)[0])
        batch.update(kept)
    assert not any(map(torch.Tensor.any, gradients)) and step.explain().dead == 0
