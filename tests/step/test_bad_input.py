"""Bad input: an error that says what, where and what next, and nothing half-done."""

from __future__ import annotations

import pytest
import torch

import gradprune
from tests.step.arms import TinyModel, make_batch
from tests.step.losses import Loss, grpo


def call(step, batch, model=None):
    return gradprune.compile(step, zero="adv * mask")(model or TinyModel(), batch)


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ("adv + mask", "not a product of names"),
        ("", "not a product of names"),
        ("adv * adv", "names a factor twice"),
        (3, "pass a product of names"),
    ],
)
def test_zero_must_be_a_product_of_names(zero, message):
    with pytest.raises(gradprune.PruneError, match=message):
        gradprune.compile(Loss(grpo), zero=zero)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"audit": 1.5}, "audit is 1.5: pass a share between 0 and 1"),
        ({"on_violation": "ignore"}, "pass 'poison' or 'raise'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(gradprune.PruneError, match=message):
        gradprune.compile(Loss(grpo), zero="adv", **options)


def test_step_must_be_callable():
    with pytest.raises(gradprune.PruneError, match="step is a int: pass the training step"):
        gradprune.compile(3, zero="adv")


def test_names_must_be_in_the_batch():
    batch = make_batch(4, 6, dead=True, seed=0)
    with pytest.raises(gradprune.PruneError, match=r"no 'mask' in a dict: it has ids, old, adv, loss_mask"):
        call(Loss(grpo), {**{k: v for k, v in batch.items() if k != "mask"}, "loss_mask": batch["mask"]})


def test_factors_must_be_tensors():
    with pytest.raises(gradprune.PruneError, match="'adv' in the batch is a list: zero= names tensors"):
        call(Loss(grpo), make_batch(4, 6, dead=True, seed=0) | {"adv": [0.0] * 4})


def test_factors_must_fit_each_other():
    with pytest.raises(gradprune.PruneError, match="must agree in their leading dimensions"):
        call(Loss(grpo), make_batch(4, 6, dead=True, seed=0) | {"adv": torch.zeros(5)})


def test_nan_advantage_is_named():
    batch = make_batch(4, 6, dead=True, seed=0)
    batch["adv"][2] = float("nan")
    with pytest.raises(gradprune.PruneError, match=r"adv\[2\] is nan \(row 2\)"):
        call(Loss(grpo), batch)


def test_step_must_return_a_loss():
    with pytest.raises(gradprune.PruneError, match="the step returned a NoneType: return the scalar loss"):
        call(lambda model, batch: None, make_batch(4, 6, dead=True, seed=0))
    with pytest.raises(gradprune.PruneError, match=r"a loss of shape \(4, 7, 11\)"):
        call(lambda model, batch: model(batch["ids"]), make_batch(4, 6, dead=True, seed=0))


def test_step_must_be_called_with_a_model():
    with pytest.raises(gradprune.PruneError, match=r"called with dict: a compiled step takes \(model, batch\)"):
        gradprune.compile(Loss(grpo), zero="adv")(make_batch(4, 6, dead=True, seed=0))


def test_plan_must_have_as_many_microbatches_as_the_data():
    batches = [make_batch(4, 6, dead=True, seed=seed) for seed in range(3)]
    plan = gradprune.StepPlan.from_rollout(torch.zeros(8), None, 4)
    with pytest.raises(gradprune.PruneError, match="the plan has 2 microbatches, the data has 3"):
        plan.bind(batches)
