"""Decorated, the loops of public GRPO code leave the same bits behind, and their dead microbatches are dead."""

from __future__ import annotations

import pytest
import torch

import gradprune
from tests.loop import shapes
from tests.loop.arms import Training, assert_equal, batch_loss, compare, token_logps, train
from tests.loop.shapes import SHAPES


@pytest.mark.parametrize("name", SHAPES)
def test_prunes(name: str) -> None:
    shape = SHAPES[name]
    decorated = compare(shape.loop, "dldd", zero=shape.zero)
    assert decorated.outcomes == shape.outcomes


def test_prunes_method() -> None:
    method = gradprune.grpo_loop("advantages * mask", strict=True)(shapes.Actor.update_policy)

    def by_decorated_worker(t: Training) -> None:
        method(shapes.Actor(t), t)

    decorated = train(by_decorated_worker, "dldd", decorate=False)
    assert_equal(decorated, train(shapes.by_worker, "dldd", decorate=False))
    assert [bool(decision.outcome) for decision in method.explain().decisions] == [False, True, False, False]


def test_keeps_reference_kl() -> None:
    """A penalty that no advantage multiplies: every microbatch has a gradient, and is left alone."""

    def loop(t: Training) -> None:
        for batch in t.batches:
            logp = token_logps(t.model, batch["ids"])
            kl = torch.exp(batch["old"] - logp) - (batch["old"] - logp) - 1
            loss = batch_loss(t.model, batch) + 0.1 * (kl * batch["mask"]).mean()
            loss.backward()
            t.log.append(loss.item())
            t.optimizer.step()

    with pytest.warns(gradprune.errors.NoEffectWarning, match=r"kl \* batch"):
        decorated = compare(loop, "dldd", strict=False)
    assert decorated.outcomes == "llll"


def test_audits() -> None:
    assert compare(shapes.by_accumulation, "dldd", audit=1.0).outcomes == "dldd"


def test_prunes_backward_as_a_function() -> None:
    def loop(t: Training) -> None:
        for batch in t.batches:
            torch.autograd.backward(batch_loss(t.model, batch))
            t.optimizer.step()

    assert compare(loop, "dld").outcomes == "dld"
