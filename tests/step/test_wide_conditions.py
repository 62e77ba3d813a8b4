"""Where the loss's own backward is not run, a gradient is poisoned if and only if the unpruned one is not finite."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gradprune
from tests.step.arms import WideModel, make_batch


def weigh(logp, weight, batch):
    return (logp * weight * batch["adv"][:, None] * batch["mask"]).sum()


def logps(model, batch):
    return torch.log_softmax(model(batch["ids"])[:, :-1], -1)[..., 0]


def ratio(model, batch):
    return weigh(torch.exp(logps(model, batch) - batch["old"]), 1.0, batch)


def written_at_an_index(model, batch):
    weight = torch.exp(-batch["old"])
    weight[batch["mask"] == 0] = 0.0
    return (logps(model, batch) * weight * batch["adv"][:, None]).sum()


def written_into_zeros(model, batch):
    weight = torch.zeros(4, 6)
    weight[:, 2:] = torch.exp(-batch["old"])[:, 2:]
    return weigh(logps(model, batch), weight, batch)


def view_written_in_place(model, batch):
    weight = torch.exp(-batch["old"])
    weight[:, 3:].mul_(0.5)
    return weigh(logps(model, batch), weight, batch)


def second_result(model, batch):
    _, weight = torch.aminmax(torch.exp(-batch["old"]), dim=1, keepdim=True)
    return weigh(logps(model, batch), weight, batch)


def second_chunk(model, batch):
    _, weight = torch.exp(-batch["old"]).chunk(2, 1)
    return (logps(model, batch)[:, 3:] * weight * batch["adv"][:, None] * batch["mask"][:, 3:]).sum()


def second_moment(model, batch):
    _, mean = torch.var_mean(batch["old"])
    return weigh(logps(model, batch), mean, batch)


def by_its_own_sum(model, batch):
    """Where all is masked, the divisor is zero, and a mask wipes out what comes of it."""
    share = torch.where(batch["mask"] > 0, logps(model, batch) / batch["mask"].sum(), 0.0)
    return (share * batch["adv"][:, None]).sum()


def by_the_largest(model, batch):
    """Nothing divided by nothing, where another branch is taken."""
    largest = batch["adv"].abs().amax()
    term = logps(model, batch) * (batch["adv"][:, None] / largest) * batch["mask"]
    return torch.where(largest > 0, term, logps(model, batch) * batch["adv"][:, None]).sum()


def from_numpy(model, batch):
    return weigh(logps(model, batch), torch.from_numpy(np.exp(-batch["old"].numpy())), batch)


def of_a_slice(model, batch):
    rest = batch["old"][:, 1:] * batch["adv"][:, None] * batch["mask"][:, 1:]
    return (logps(model, batch)[:, 1:] * rest).sum()


def of_masked_rows(model, batch):
    keep = batch["mask"] > 0
    logits = model(batch["ids"])[:, :-1].masked_fill(~keep[..., None], -torch.inf)
    logp = torch.log_softmax(logits, -1)[..., 0]
    surrogate = torch.exp(logp - batch["old"]).clamp(max=2.0) * batch["adv"][:, None]
    return torch.where(keep, surrogate, 0.0).sum()


def cross_entropy(model, batch, **options):
    logits = model(batch["ids"])[:, :-1].flatten(0, 1)
    minus = F.cross_entropy(logits, labels(batch).flatten(), reduction="none", **options)
    return weigh(torch.exp(-minus.view_as(batch["old"]) - batch["old"]), 1.0, batch)


def smoothed(model, batch):
    return cross_entropy(model, batch, label_smoothing=0.1)


def transposed(model, batch):
    """Labels in another order than the ratios."""
    logits = model(batch["ids"])[:, :-1].transpose(0, 1).flatten(0, 1)
    minus = F.cross_entropy(logits, labels(batch).t().flatten(), reduction="none")
    return weigh(torch.exp(-minus.view(6, 4).t() - batch["old"]), 1.0, batch)


def of_images(model, batch):
    logits = model(batch["ids"])[:, :-1].transpose(1, 2)
    return weigh(torch.exp(-F.cross_entropy(logits, labels(batch), reduction="none") - batch["old"]), 1.0, batch)


def labels(batch):
    """Where the mask is zero, the label is ignored."""
    return torch.where(batch["mask"] > 0, batch["ids"][:, 1:], -100)


LOSSES = [
    *(ratio, written_at_an_index, written_into_zeros, view_written_in_place, second_result, second_chunk),
    *(
        second_moment,
        by_its_own_sum,
        from_numpy,
        of_a_slice,
        of_masked_rows,
        cross_entropy,
        smoothed,
        transposed,
        of_images,
    ),
]
VALUES = (-300.0, math.nan, math.inf, -math.inf, 1e30)
PLACES = [(0, 0), (1, 0), (1, 4)]  # the first row is masked out


def has_nan(model):
    return any(not parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def dead_batch(seed):
    batch = make_batch(4, 6, dead=True, seed=seed)
    batch["adv"][:] = 0.0
    batch["mask"][:] = 1.0
    batch["mask"][0] = 0.0
    return batch


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("loss", LOSSES)
def test_poisons_where_the_unpruned_gradient_is_not_finite(loss):
    model, broken = WideModel().eval(), 0
    pruned = gradprune.compile(loss, zero="adv * mask")
    pruned(model, dead_batch(0)).backward()
    for value, place in itertools.product(VALUES, PLACES):
        batch = dead_batch(1)
        batch["old"][place] = value
        model.zero_grad()
        loss(model, batch).backward()
        expected = has_nan(model)
        model.zero_grad()
        pruned(model, batch).backward()
        assert has_nan(model) == expected, (value, place)
        broken += expected
    assert pruned.explain().dead >= len(VALUES) * len(PLACES)  # one more is dead or tells another program apart
    assert broken or loss in (of_masked_rows, by_its_own_sum)


@pytest.mark.parametrize("loss", [ratio, by_its_own_sum, by_the_largest, cross_entropy])
def test_a_microbatch_that_is_masked_out_altogether(loss):
    model, pruned = WideModel().eval(), gradprune.compile(loss, zero="adv * mask")
    for seed in range(3):
        batch = dead_batch(seed)
        batch["mask"][:] = float(seed == 0)
        model.zero_grad()
        loss(model, batch).backward()
        expected = has_nan(model)
        model.zero_grad()
        pruned(model, batch).backward()
        assert has_nan(model) == expected


def test_closure_tensor_is_looked_at():
    weight = torch.ones(4, 6)

    def loss(model, batch):
        return weigh(logps(model, batch), weight, batch)

    model, pruned = WideModel().eval(), gradprune.compile(loss, zero="adv * mask")
    for value in (1.0, 1.0, math.inf, 1.0):
        weight.fill_(value)
        model.zero_grad()
        pruned(model, dead_batch(1)).backward()
        assert has_nan(model) == (value == math.inf)
    assert pruned.explain().dead == 4


def test_microbatch_without_a_backward_poisons_nothing():
    """``if loss.isfinite(): loss.backward()``"""
    model, pruned = WideModel().eval(), gradprune.compile(ratio, zero="adv * mask", on_violation="raise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed, value in enumerate((0.0, 0.0, -300.0, 0.0)):
        batch = dead_batch(seed)
        batch["old"][1, 0] = value
        loss = pruned(model, batch)
        if loss.isfinite():
            loss.backward()
        else:
            assert value == -300.0
    optimizer.step()
    assert pruned.explain().dead == 4 and not has_nan(model)


def test_each_backward_is_poisoned():
    model, pruned = WideModel().eval(), gradprune.compile(ratio, zero="adv * mask")
    pruned(model, dead_batch(0)).backward()
    batch = dead_batch(1)
    batch["old"][1, 0] = -300.0
    model.zero_grad()
    loss = pruned(model, batch)
    (first,) = torch.autograd.grad(loss, model.head.bias, retain_graph=True)
    assert first.isnan().any()
    loss.backward()
    assert has_nan(model)


def test_a_second_random_sample_is_not_the_first():
    """The loss draws after the metric, which on the tape it does not: what is looked at would be the metric's."""

    def loss(model, batch):
        logp = logps(model, batch)
        torch.exp(-F.dropout(logp, 0.9)).mean()
        return weigh(torch.exp(-F.dropout(logp, 0.9)), 1.0, batch)

    model, pruned = WideModel().eval(), gradprune.compile(loss, zero="adv * mask")
    for seed in range(2):
        pruned(model, dead_batch(seed)).backward()
    assert [bool(decision.outcome) for decision in pruned.explain().decisions] == [False, True]
