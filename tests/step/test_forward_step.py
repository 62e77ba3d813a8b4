"""A Megatron forward_step and its data iterator, as trainers write them, without Megatron."""

from __future__ import annotations

import pytest
import torch

import gradprune
from gradprune.errors import NoEffectWarning
from tests.step.arms import TinyModel, make_batch
from tests.step.losses import Loss, grpo


class Reader:
    """A data iterator that the step asks by a method of its own; not one that ``next()`` reads."""

    def __init__(self, batches):
        self.batches = iter(batches)

    def get_next(self):
        return next(self.batches)


class Iterator(Reader):
    """One that has more than ``__next__``."""

    source = "rollout"

    def __next__(self):
        return next(self.batches)


def forward_step(data_iterator, model):
    batch = data_iterator.get_next() if type(data_iterator) is Reader else next(data_iterator)
    return model(batch["ids"]), lambda output: Loss(grpo)(lambda ids: output, batch)


def step_that_asks(data_iterator, model):
    assert data_iterator.source == "rollout"
    return forward_step(data_iterator, model)


def batches(count=3):
    return [make_batch(4, 6, dead=True, seed=seed) for seed in range(count)]


def run(step, iterator, model, count=3):
    for _ in range(count):
        output, loss_func = step(iterator, model)
        loss_func(output)[0].backward()


def test_prunes_with_an_iterator_that_has_attributes():
    step = gradprune.compile(step_that_asks, zero="adv * mask")
    run(step, Iterator(batches()), TinyModel())
    assert not any(decision.outcome for decision in step.explain().decisions)


def test_keeps_live_what_next_does_not_read():
    step = gradprune.compile(forward_step, zero="adv * mask")
    with pytest.warns(NoEffectWarning, match="Reader has no __next__"):
        run(step, Reader(batches()), TinyModel())


def test_keeps_live_without_gradients_whatever_the_batch():
    """Old log-probabilities come from the same step, before there are advantages."""

    def logps(data_iterator, model):
        return model(next(data_iterator)["ids"]), lambda output: (output.sum(), {})

    step, batch = gradprune.compile(logps, zero="adv * mask"), make_batch(4, 6, dead=True, seed=0)
    with torch.no_grad():
        output, loss_func = step(iter([{"ids": batch["ids"]}]), TinyModel())
        loss_func(output)
    with pytest.raises(gradprune.PruneError, match="no 'adv'"):
        step(iter([{"ids": batch["ids"]}]), TinyModel())


def test_keeps_live_what_gives_no_loss():
    """Megatron's schedules ask the loss function for ``non_loss_data`` with ``collect_non_loss_data``."""

    def logps(data_iterator, model):
        return model(next(data_iterator)["ids"]), lambda output, non_loss_data=False: {"logps": output.log_softmax(-1)}

    model = TinyModel().eval()
    step, both = gradprune.compile(forward_step, zero="adv * mask"), gradprune.compile(logps, zero="adv * mask")
    run(step, iter(batches()), model)
    for grad in (True, True, False):
        with torch.set_grad_enabled(grad):
            output, loss_func = both(iter(batches(1)), model)
            expected = model(batches(1)[0]["ids"]).log_softmax(-1)
            assert torch.equal(loss_func(output, non_loss_data=True)["logps"], expected)
    assert "something else than a loss" in str(both.explain())
