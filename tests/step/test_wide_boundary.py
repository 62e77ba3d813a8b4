"""Logits as the boundary: the loss's own backward is run for a sample, the side conditions are looked at for all."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import gradprune
from gradprune.errors import ViolationError
from tests.step.arms import TinyModel, assert_equal, make_batch, outcomes, train
from tests.step.losses import Loss, by_where, grpo


class WideModel(TinyModel):
    """Logits over a vocabulary much larger than a batch."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 512)


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


def backwards_of_the_loss(model, count=12):
    """In which of some dead microbatches the loss's own backward ran."""
    step, ran = gradprune.compile(counted, zero="adv * mask"), []
    for seed in range(count):
        before = len(Counted.ran)
        step(model, make_batch(4, 6, dead=True, seed=seed)).backward()
        ran.append(len(Counted.ran) > before)
    return ran


def test_samples_the_boundary_of_a_wide_output():
    # The first is observed live; then every eighth dead microbatch.
    assert backwards_of_the_loss(WideModel()) == [True] + [False] * 7 + [True] + [False] * 3


def test_always_looks_at_a_narrow_output():
    assert all(backwards_of_the_loss(TinyModel()))


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
