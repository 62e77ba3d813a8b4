"""Dead microbatches that would not have been zero: overflow, plans that lie, gradients that no loss proof sees."""

from __future__ import annotations

import pytest
import torch

import gradprune
from gradprune.errors import StalePlanError, ViolationError
from tests.step.arms import TinyModel, make_batch
from tests.step.losses import by_product


def unclamped(model, batch):
    """GRPO whose ratio overflows where old is far below the policy."""
    logp = torch.log_softmax(model(batch["ids"])[:, :-1], -1)[..., 0]
    ratio = torch.exp(logp - batch["old"])
    return by_product(-ratio * batch["adv"][:, None], batch)


def overflowing(seed, column=0):
    batch = make_batch(4, 6, dead=True, seed=seed)
    batch["old"][0, column] = -200.0
    return batch


def sgd_on(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("warm", [False, True], ids=["first", "proved"])
def test_poisons_gradients_as_unpruned(warm):
    model = TinyModel()
    step, optimizer = gradprune.compile(unclamped, zero="adv * mask"), sgd_on(model)
    if warm:
        step(model, make_batch(4, 6, dead=True, seed=0)).backward()
        optimizer.zero_grad()
    step(model, overflowing(1)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.isnan(), "the trainer's own check for overflow sees it before the optimizer steps"
    optimizer.step()
    used = [parameter for name, parameter in model.named_parameters() if name != "unused"]
    assert all(parameter.grad.isnan().all() for parameter in used)


def test_does_not_poison_without_overflow():
    model = TinyModel()
    step, optimizer = gradprune.compile(unclamped, zero="adv * mask"), sgd_on(model)
    for seed in range(2):
        step(model, make_batch(4, 6, dead=True, seed=seed)).backward()
    optimizer.step()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_raises_on_overflow_and_names_the_microbatch():
    model = TinyModel()
    step, optimizer = gradprune.compile(unclamped, zero="adv * mask", on_violation="raise"), sgd_on(model)
    step(model, make_batch(4, 6, dead=True, seed=0)).backward()
    step(model, overflowing(1)).backward()
    with pytest.raises(ViolationError, match="microbatch 1: the gradient of this dead microbatch is not finite"):
        optimizer.step()


def test_all_masked_microbatch_is_dead_and_poisons_like_the_unpruned():
    """0/0 in a loss that divides by the mask's sum: NaN, pruned or not."""

    def by_mean(model, batch):
        logp = torch.log_softmax(model(batch["ids"])[:, :-1], -1)[..., 0]
        return (-logp * batch["adv"][:, None] * batch["mask"]).sum() / batch["mask"].sum()

    model = TinyModel()
    step, optimizer = gradprune.compile(by_mean, zero="adv * mask"), sgd_on(model)
    step(model, make_batch(4, 6, dead=True, seed=0)).backward()
    batch = make_batch(4, 6, dead=False, seed=1)
    batch["mask"].zero_()
    loss = step(model, batch)
    assert loss.isnan()
    loss.backward()
    optimizer.step()
    assert model.mix.weight.grad.isnan().all()


def test_empty_microbatch_runs_live():
    model = TinyModel().eval()
    step = gradprune.compile(unclamped, zero="adv * mask")
    batch = {name: tensor[:0] for name, tensor in make_batch(4, 6, dead=True, seed=0).items()}
    step(model, batch).backward()
    assert "empty" in str(step.explain())


def test_lying_plan_is_caught_before_the_forward():
    batches = [make_batch(4, 6, dead=dead, seed=seed) for seed, dead in enumerate((True, False))]
    advantages, masks = (torch.cat([batch[name] for batch in batches]) for name in ("adv", "mask"))
    plan = gradprune.StepPlan.from_rollout(advantages, masks, 4)
    step, ran = gradprune.compile(unclamped, zero="adv * mask"), []
    model = TinyModel()
    model.register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(StalePlanError, match=r"microbatch 0 is planned dead.*adv \* mask != 0 in row"):
        for batch in plan.bind(reversed(batches)):
            step(model, batch).backward()
    assert not ran


class Injected(torch.autograd.Function):
    """The identity, with a gradient of its own, as a router's auxiliary loss has it."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 1e-3


class InjectingModel(TinyModel):
    def forward(self, ids):
        return super().forward(ids + 0) if not self.training else Injected.apply(super().forward(ids)) * 1.0


@pytest.mark.parametrize("kind", [InjectingModel, TinyModel], ids=["injecting", "plain"])
def test_audit_catches_gradient_injected_inside_the_model(kind):
    model = kind()
    step, optimizer = gradprune.compile(unclamped, zero="adv * mask", audit=0.5), sgd_on(model)
    for seed in range(2):
        step(model, make_batch(4, 6, dead=True, seed=seed)).backward()
    if kind is TinyModel:
        optimizer.step()
        return
    with pytest.raises(ViolationError, match="microbatch 0 was proved dead, but an audited gradient reaches"):
        optimizer.step()


def test_audits_the_stated_share_evenly():
    model, step = TinyModel(), gradprune.compile(unclamped, zero="adv * mask", audit=0.25)
    passes = []
    model.mix.register_full_backward_hook(lambda *_: passes.append(len(step.explain().decisions)))
    for seed in range(8):
        step(model, make_batch(4, 6, dead=True, seed=seed)).backward()
    assert passes == [1, 5]  # the first dead microbatch and the fifth, counted when their own backward runs
