"""Logits as the boundary: the loss's own backward is run for a sample, the side conditions are looked at for all."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import gradprune
from gradprune.errors import ViolationError
from tests.step.arms import TinyModel, WideModel, assert_equal, make_batch, outcomes, train
from tests.step.losses import Loss, by_where, grpo


def unclamped(model, batch):
    logp = torch.log_softmax(model(batch["ids"])[:, :-1], -1)[..., 0]
    return by_where(-torch.exp(logp - batch["old"]) * batch["adv"][:, None], batch)


class Counted(torch.autograd.Function):
    """The identity; notes its backwards."""

    ran: ClassVar[list[None]] = []

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        Counted.ran.append(None)
        return gradient


def counted(model, batch):
    logp = torch.log_softmax(model(batch["ids"])[:, :-1], -1)[..., 0]
    return by_where(-torch.exp(Counted.apply(logp) - batch["old"]) * batch["adv"][:, None], batch)


def backwards_of_the_loss(model, count=20):
    """In which of some dead microbatches the loss's own backward ran."""
    step, ran = gradprune.compile(counted, zero="adv * mask"), []
    for seed in range(count):
        before = len(Counted.ran)
        step(model, make_batch(4, 6, dead=True, seed=seed)).backward()
        ran.append(len(Counted.ran) > before)
    return ran


def test_samples_the_boundary_of_a_wide_output():
    # The first is observed live; then every sixteenth dead microbatch.
    assert backwards_of_the_loss(WideModel()) == [True] + [False] * 15 + [True] + [False] * 3


def test_always_looks_at_a_narrow_output():
    assert all(backwards_of_the_loss(TinyModel()))


def by_cross_entropy(model, batch):
    """The log-softmax is computed inside of one torch call; rows whose label is ignored do not show in its result."""
    shift = torch.nn.functional.pad(batch["shift"][..., None], (0, 511))
    logits = model(batch["ids"])[:, :-1] + shift
    minus = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    ratio = torch.exp(-minus.view_as(batch["old"]) - batch["old"]).clamp(max=2.0)
    return by_where(-ratio * batch["adv"][:, None], batch)


def labelled(seed, *, ignored=(), shift=0.0):
    batch = make_batch(4, 6, dead=True, seed=seed)
    batch["labels"] = torch.ones(batch["old"].shape, dtype=torch.long)
    batch["shift"] = torch.zeros_like(batch["old"])
    for row, column in ignored:
        batch["labels"][row, column] = -100
        batch["shift"][row, column] = shift
    return batch


def wide_step(model):
    step = gradprune.compile(by_cross_entropy, zero="adv * mask", on_violation="raise")
    step(model, labelled(0)).backward()  # observed
    return step


def test_value_inside_of_a_call_is_looked_at():
    model = WideModel()
    step = wide_step(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, labelled(1, ignored=[(2, 1)], shift=torch.nan)).backward()
    with pytest.raises(ViolationError, match=r"microbatch 1, notnan\(log_softmax\)"):
        optimizer.step()


def has_nan(model):
    return any(parameter.grad.isnan().any() for parameter in model.parameters() if parameter.grad is not None)


def test_condition_that_fails_poisons():
    """It is no fault of the proof, so that nothing is raised where the gradient shows it."""
    model = WideModel()
    step = gradprune.compile(by_cross_entropy, zero="adv * mask")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, labelled(0)).backward()
    assert not has_nan(model)
    step(model, labelled(1, ignored=[(2, 1)], shift=torch.nan)).backward()
    optimizer.step()
    assert has_nan(model)


def test_masked_logits_are_no_violation():
    model = WideModel()
    step = wide_step(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, labelled(1, ignored=[(2, 1)], shift=-torch.inf)).backward()
    optimizer.step()
    assert step.explain().dead == 2


def test_boundary_is_looked_at_where_the_value_was_not_seen(monkeypatch):
    """As if the call had been computed by other operators than those of its trace."""
    model = WideModel()
    step = wide_step(model)
    monkeypatch.setattr(
        "gradprune.runtime.checks._Inside.__torch_dispatch__", lambda self, f, t, a=(), k=None: f(*a, **k)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, labelled(1, ignored=[(2, 1)], shift=torch.nan)).backward()
    with pytest.raises(ViolationError, match="microbatch 1"):
        optimizer.step()


@pytest.mark.parametrize("column", [0, 1], ids=["scored", "perhaps masked"])
def test_condition_is_seen_without_the_boundary(column):
    model = WideModel()
    step = gradprune.compile(unclamped, zero="adv * mask", on_violation="raise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        batch = make_batch(4, 6, dead=True, seed=seed)
        if seed == 2:
            batch["old"][0, column] = -200.0
        step(model, batch).backward()
    with pytest.raises(ViolationError, match=r"microbatch 2, finite\(exp\)"):
        optimizer.step()


def test_condition_that_holds_does_not_fire():
    model = WideModel()
    step = gradprune.compile(unclamped, zero="adv * mask", on_violation="raise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        step(model, make_batch(4, 6, dead=True, seed=seed)).backward()
    optimizer.step()


def test_prunes_wide_output_bit_for_bit(monkeypatch):
    monkeypatch.setattr("tests.step.arms.TinyModel", WideModel)
    updates = [[make_batch(4, 6, dead=dead, seed=10 * u + m) for m, dead in enumerate((1, 1, 0, 1))] for u in range(3)]
    pruned = train(Loss(grpo), updates, compiled=True)
    assert outcomes(pruned) == "ddld" * 3
    assert_equal(pruned, train(Loss(grpo), updates, compiled=False))
