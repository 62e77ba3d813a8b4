"""Gradient that comes from elsewhere than the loss: the model itself, a hook, or another backward of the caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradprune
from tests.adversarial.scenario import Bare, Batch, Scenario, assert_same_training, dead, policy_loss, token_logps, wide
from tests.adversarial.test_models import LONG, Doubling, Of
from tests.adversarial.test_side_effects import Recomputes
from tests.step.arms import VOCABULARY, TinyModel


@torch.library.custom_op("adversarial::inject", mutates_args=())
def inject(x: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    return x.clone()


inject.register_fake(lambda x, penalty: torch.empty_like(x))
inject.register_autograd(lambda ctx, gradient: (gradient, torch.full((), 0.01)))


@torch.library.custom_op("adversarial::scale", mutates_args=())
def scale_by(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


scale_by.register_fake(lambda x, scale: torch.empty_like(x))
scale_by.register_autograd(lambda ctx, gradient: (gradient, None))


class InjectsByOperator(TinyModel):
    """The Function of a custom operator is one of torch's own modules."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return inject(super().forward(ids), self.mix.weight.square().sum())


class InjectsByHook(Bare):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(ids)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient + 1e-3)
        return self.head(hidden)


class InjectsByHookNowAndThen(InjectsByHook):
    """The hook comes with some of the data only."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) if int(ids.sum()) % 3 == 0 else self.head(self.hidden(ids))


def test_keeps_gradient_of_a_hook_that_comes_with_some_data():
    outcomes = assert_same_training(lambda: Of(InjectsByHookNowAndThen))
    assert "d" in outcomes and "l" in outcomes[1:]


@pytest.mark.parametrize("make", [InjectsByOperator, InjectsByHook])
def test_keeps_gradient_of_the_models_own(make):
    assert "d" not in assert_same_training(lambda: Of(make))


class _Auxiliary(torch.autograd.Function):
    """As a router's auxiliary loss: what it adds is an attribute of the class."""

    scale = 0.0

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, torch.full((), _Auxiliary.scale)


class ScaleOnTheClass(Scenario):
    """Raised in the third microbatch of later updates."""

    updates = ("dddd", "dddd", "dddd")
    make: Any = Bare

    def model(self) -> torch.nn.Module:
        return type(self).make()

    def before(self, model: Any, update: int, microbatch: int) -> Any:
        _Auxiliary.scale = 0.01 if update and microbatch == 2 else 0.0

    def step(self, model: Any, batch: Batch) -> Any:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        return _Auxiliary.apply(policy_loss(logp, batch), logp.square().sum())


class ScaleOnTheClassWide(ScaleOnTheClass):
    make = staticmethod(lambda: wide(Bare()))


@pytest.mark.parametrize("scenario", [ScaleOnTheClass, ScaleOnTheClassWide], ids=lambda scenario: scenario.__name__)
def test_keeps_what_a_function_of_the_loss_adds_now_and_then(scenario):
    assert assert_same_training(scenario) == "dddd" + "ddld" + "ddld"


class HookReadsState(ScaleOnTheClassWide):
    """A bound method as hook: equal at each call, and what it reads is private."""

    _noise = 0.0

    def before(self, model: Any, update: int, microbatch: int) -> Any:
        self._noise = 1e-3 if update and microbatch == 2 else 0.0

    def hook(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + self._noise if self._noise else gradient

    def step(self, model: Any, batch: Batch) -> Any:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        logp.register_hook(self.hook)
        return policy_loss(logp, batch)


def test_keeps_what_a_hook_adds_now_and_then():
    assert assert_same_training(HookReadsState).count("l") >= 2


class _Ignores(torch.autograd.Function):
    """No gradient, rather than one of zero, for `ignored`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class TwoHeads(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.value = torch.nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.hidden(ids)
        return self.head(hidden), self.value(hidden).squeeze(-1)


class IgnoredInLoss(Scenario):
    """The gradient of the value head stays None, and the optimizer leaves it alone."""

    updates = LONG

    def model(self) -> torch.nn.Module:
        return TwoHeads()

    def step(self, model: Any, batch: Batch) -> Any:
        logits, value = model(batch["ids"])
        return _Ignores.apply(policy_loss(token_logps(logits, batch["ids"]), batch), value.mean())


class IgnoresByFunction(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return _Ignores.apply(super().forward(ids), self.scale)


class IgnoresByOperator(IgnoresByFunction):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return scale_by(Bare.forward(self, ids), self.scale)


def test_prunes_where_a_function_of_the_loss_gives_none():
    assert assert_same_training(IgnoredInLoss) == "".join(LONG)


@pytest.mark.parametrize("make", [IgnoresByOperator, IgnoresByFunction])
def test_keeps_none_where_a_function_of_the_model_gives_none(make):
    assert "d" not in assert_same_training(lambda: Of(make))


def test_keeps_sparse_gradients():
    model, step = Bare(), gradprune.compile(Scenario().step, zero="adv * mask")
    model.embed = torch.nn.Embedding(VOCABULARY, 8, sparse=True)
    for seed in range(3):
        model.zero_grad()
        step(model, dead(seed)).backward()
        assert model.embed.weight.grad.layout is torch.sparse_coo
    assert "sparse" in str(step.explain().decisions[-1].outcome)


class IntoSomeParameters(Scenario):
    """``zero_grad()`` between the loss and a backward that is asked for one parameter."""

    updates = ("d",) * 3

    def model(self) -> torch.nn.Module:
        self.made = TinyModel()
        return self.made

    def before(self, model: Any, update: int, microbatch: int) -> Any:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def backward(self, output: Any, share: int) -> torch.Tensor:
        self.made.zero_grad()
        output.backward(inputs=[self.made.head.weight])
        return output


def test_prunes_a_backward_into_some_parameters():
    assert assert_same_training(IntoSomeParameters) == "ddd"


def test_audit_does_not_hear_another_backward_of_the_caller():
    model = Recomputes(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gradprune.compile(Scenario().step, zero="adv * mask", audit=1.0)
    for seed in range(4):
        optimizer.zero_grad()
        step(model, dead(seed)).backward()
        model.mix.weight.square().sum().backward()
        optimizer.step()
    step.check()


def test_prunes_after_a_trial_with_a_buffer_of_nan():
    """NaN is not equal to itself, and yet it was not written."""
    model, step = Doubling(), gradprune.compile(Scenario().step, zero="adv * mask")
    model.register_buffer("nothing", torch.full((2,), float("nan")))
    for seed in range(4):
        step(model, dead(seed)).backward()
    assert not step.explain().decisions[-1].outcome
