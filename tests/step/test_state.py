"""A verdict hangs on the Python state that the step reads: when it changes, dead microbatches turn live at once."""

from __future__ import annotations

import types
from dataclasses import dataclass

import pytest
import torch

from gradprune.errors import NoEffectWarning
from tests.step.arms import assert_equal, make_batch, outcomes, train
from tests.step.losses import Loss, by_product, grpo, kl

KL = 0.0


@dataclass
class Config:
    kl: float = 0.0


def with_kl(coefficient, model, batch):
    """GRPO plus KL, whose coefficient multiplies it whatever it is: 0 * KL has gradient zero, 0.05 * KL has not."""
    loss, metrics = Loss(grpo)(model, batch)
    logp = torch.log_softmax(model.eval()(batch["ids"])[:, :-1], -1)[..., 0]
    model.train()
    return loss + coefficient * kl(logp, batch, by_product), metrics


class ByClosure:
    def __init__(self):
        coefficient = 0.0

        def step(model, batch):
            return with_kl(coefficient, model, batch)

        def change(value):
            nonlocal coefficient
            coefficient = value

        self.step, self.change = step, change


class ByAttribute:
    kl = 0.0

    def step(self, model, batch):
        return with_kl(self.kl, model, batch)

    def change(self, value):
        self.kl = value


class ByConfig:
    def __init__(self):
        self.args = types.SimpleNamespace(loss=Config())

    def step(self, model, batch):
        return with_kl(self.args.loss.kl, model, batch)

    def change(self, value):
        self.args.loss.kl = value


class ByGlobal:
    @staticmethod
    def step(model, batch):
        return with_kl(KL, model, batch)

    @staticmethod
    def change(value):
        global KL
        KL = value


class ByCall:
    """A schedule that is asked, and keeps its state where no look at attributes finds it."""

    def __init__(self):
        self._values = iter(())

    def step(self, model, batch):
        return with_kl(next(self._values, 0.0), model, batch)

    def change(self, value):
        self._values = iter([value] * 100)


PLACES = [ByClosure, ByAttribute, ByConfig, ByGlobal]


def schedule_of(place):
    def before(update, microbatch):
        if microbatch == 1:  # in the middle of an update
            place.change(0.05 if update == 1 else 0.0)

    return before


@pytest.mark.parametrize("kind", PLACES, ids=lambda kind: kind.__name__)
def test_keeps_when_coefficient_is_raised_and_prunes_when_it_is_back(kind):
    updates = [[make_batch(4, 6, dead=True, seed=10 * u + m) for m in range(3)] for u in range(4)]
    arms = []
    for compiled in (True, False):
        place = kind()
        place.change(0.0)
        arms.append(train(place.step, updates, compiled=compiled, before=schedule_of(place)))
    assert outcomes(arms[0]) == "ddd" + "dll" + "ldd" + "ddd"
    assert_equal(*arms)


def test_keeps_when_state_changes_out_of_sight():
    """What no look at the state shows in time is seen in the calls; that it is back is noticed a little later."""
    updates = [[make_batch(4, 6, dead=True, seed=10 * u + m) for m in range(3)] for u in range(9)]
    arms = [
        train(place.step, updates, compiled=c, before=schedule_of(place)) for c in (True, False) for place in [ByCall()]
    ]
    assert outcomes(arms[0]).startswith("ddd" + "dll" + "l")
    assert outcomes(arms[0]).endswith("d")
    assert_equal(*arms)


def test_prunes_beside_counters_and_logs():
    """State that changes at every call and does not enter the loss costs no second proof."""

    class Trainer:
        def __init__(self):
            self.calls, self.log = 0, []

        def step(self, model, batch):
            self.calls += 1
            loss, metrics = Loss(grpo)(model, batch)
            if self.calls % 3 == 0:
                self.log.append(metrics["ratio"].item() + batch["old"].mean().item())
            return loss, metrics

    updates = [[make_batch(4, 6, dead=True, seed=m) for m in range(8)]]
    trainers = [Trainer(), Trainer()]
    pruned, unpruned = (train(t.step, updates, compiled=c) for t, c in zip(trainers, (True, False)))
    assert outcomes(pruned) == "d" * 8
    assert len(pruned.step.explain().verdicts) == 1
    assert_equal(pruned, unpruned)
    assert trainers[0].log == trainers[1].log
    assert trainers[0].calls == trainers[1].calls


def test_keeps_on_branch_that_was_not_proved():
    def step(model, batch):
        loss, metrics = Loss(grpo)(model, batch)
        if batch["ids"][0, 0] == 3:  # data decides
            loss = loss + 0.01 * model(batch["ids"]).pow(2).mean()
        return loss, metrics

    def with_first_token(token, seed):
        batch = make_batch(4, 6, dead=True, seed=seed)
        batch["ids"][0, 0] = token
        return batch

    updates = [[with_first_token(token, seed) for seed, token in enumerate((1, 1, 3, 1))]]
    pruned, unpruned = (train(step, updates, compiled=compiled) for compiled in (True, False))
    assert outcomes(pruned) == "ddld"
    assert_equal(pruned, unpruned)


def test_prunes_with_coefficient_in_the_batch():
    def step(model, batch):
        return with_kl(batch["kl"], model, batch)

    updates = [[make_batch(4, 6, dead=True, seed=m) | {"kl": value} for m, value in enumerate((0.0, 0.1, 0.0))]]
    pruned, unpruned = (train(step, updates, compiled=compiled) for compiled in (True, False))
    assert outcomes(pruned) == "dld"
    assert_equal(pruned, unpruned)


def weighted(offset):
    """A step that weighs each microbatch by a Python number of its own, as token-weighted accumulation does."""

    def step(model, batch):
        loss, metrics = Loss(grpo)(model, batch)
        share = int(batch["mask"].sum()) / 97
        return loss * share + offset * share * model(batch["ids"]).mean(), metrics

    return step


def test_prunes_whatever_number_weighs_the_microbatch():
    updates = [[make_batch(4, 6, dead=True, seed=10 * u + m) for m in range(4)] for u in range(3)]

    def step(model, batch):
        loss, metrics = Loss(grpo)(model, batch)
        return loss * (len(metrics) + int(batch["ids"].sum()) / 97), metrics

    pruned, unpruned = (train(step, updates, compiled=compiled) for compiled in (True, False))
    # Each of the first numbers is met by a dead run that expects the one before and is taken back, and is then proved
    # by itself; the third time, the proof is made for any number.
    assert outcomes(pruned) == "dldl" + "d" * 8
    assert len(pruned.step.explain().verdicts) == 3
    assert_equal(pruned, unpruned)


def test_keeps_whatever_number_weighs_the_live_term():
    updates = [[make_batch(4, 6, dead=True, seed=10 * u + m) for m in range(4)] for u in range(2)]
    with pytest.warns(NoEffectWarning):
        kept = train(weighted(0.1), updates, compiled=True)
    assert outcomes(kept) == "l" * 8
    assert_equal(kept, train(weighted(0.1), updates, compiled=False))
