"""Tensors that are written to behind torch's back, kept on the side, shared, or of unusual kinds."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import gradprune
from gradprune.errors import NoEffectWarning
from tests.adversarial.scenario import Batch, Scenario, assert_same_training, policy_loss, token_logps
from tests.step.arms import TinyModel, make_batch

MIXED = ("ddd", "dld", "ddd")


class InferenceMode(Scenario):
    """Old log-probs come from a rollout in inference mode, and have no version counter."""

    updates = MIXED

    def batch(self, letter: str, seed: int) -> Batch:
        batch = super().batch(letter, seed)
        with torch.inference_mode():
            return batch | {"old": batch["old"] + 0}


class WrittenThroughData(Scenario):
    updates = MIXED

    def step(self, model: Any, batch: Batch) -> Any:
        logits = model(batch["ids"])
        batch["adv"].data.add_(0.5)
        return policy_loss(token_logps(logits, batch["ids"]), batch)


class MaskOfTwoKinds(Scenario):
    updates = MIXED

    def batch(self, letter: str, seed: int) -> Batch:
        batch = super().batch(letter, seed)
        return batch | {"mask": batch["mask"].bool()} if seed % 2 else batch

    def step(self, model: Any, batch: Batch) -> Any:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        return -(logp * batch["adv"][:, None] * batch["mask"]).sum()


class RowsAsManyAsTokens(Scenario):
    """Advantages broadcast along the wrong dimension."""

    def batch(self, letter: str, seed: int) -> Batch:
        return make_batch(6, 6, dead=letter == "d", seed=seed)

    def step(self, model: Any, batch: Batch) -> Any:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        return -(logp * batch["adv"][None, :] * batch["mask"]).sum()


class ChosenByZeroAdvantage(Scenario):
    def step(self, model: Any, batch: Batch) -> Any:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        return -logp[batch["adv"] == 0].sum()


class KeptOnTheSide(TinyModel):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.hidden = self.dropout(torch.tanh(self.mix(self.embed(ids))))
        return self.head(self.norm(self.hidden.transpose(1, 2)).transpose(1, 2))


class AuxiliaryLoss(Scenario):
    def model(self) -> torch.nn.Module:
        return KeptOnTheSide()

    def step(self, model: Any, batch: Batch) -> Any:
        return self.loss(model, batch) + 0.01 * model.hidden.square().mean()


class NoiseOnLogits(Scenario):
    def step(self, model: Any, batch: Batch) -> Any:
        logits = model(batch["ids"])
        logits.register_hook(lambda gradient: gradient + 1e-3)
        return policy_loss(token_logps(logits, batch["ids"]), batch)


class Tagged(torch.Tensor):
    """A subclass that changes nothing."""


class SubclassInBatch(Scenario):
    updates = MIXED

    def batch(self, letter: str, seed: int) -> Batch:
        return {name: value.as_subclass(Tagged) for name, value in super().batch(letter, seed).items()}


class WrittenByNumpy(Scenario):
    updates = MIXED

    def step(self, model: Any, batch: Batch) -> Any:
        logits = model(batch["ids"])
        batch["adv"].numpy()[:] += 0.5
        return policy_loss(token_logps(logits, batch["ids"]), batch)


class WrittenByNumpyNowAndThen(WrittenByNumpy):
    calls = 0

    def step(self, model: Any, batch: Batch) -> Any:
        self.calls += 1
        return super().step(model, batch) if self.calls % 3 == 0 else self.loss(model, batch)


class WrittenByNumpyManyOutputs(WrittenByNumpyNowAndThen):
    def model(self) -> torch.nn.Module:
        model = TinyModel()
        model.head = torch.nn.Linear(8, 200)
        return model


class AliasOfLoss(Scenario):
    updates = MIXED

    def step(self, model: Any, batch: Batch) -> Any:
        loss = self.loss(model, batch)
        return loss, loss.view(1)

    def backward(self, output: Any, share: int) -> torch.Tensor:
        (output[1].sum() / share).backward()
        return output[0]


class HookOnOutput(Scenario):
    """A user's hook on the outermost module, which doubles what comes back."""

    updates = MIXED

    def model(self) -> torch.nn.Module:
        model = TinyModel()
        model.register_forward_hook(lambda module, args, output: output.register_hook(lambda g: 2 * g) and None)
        return model


class SameForMetric(Scenario):
    """A metric is computed as the loss is, before it."""

    updates = MIXED

    def step(self, model: Any, batch: Batch) -> Any:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        metric = policy_loss(logp, batch)
        return policy_loss(logp, batch), {"loss": metric.detach()}


class LossInPlace(Scenario):
    updates = MIXED

    def step(self, model: Any, batch: Batch) -> Any:
        loss = self.loss(model, batch)
        loss.mul_(0.5)
        return loss


PRUNED = (InferenceMode, MaskOfTwoKinds, SameForMetric, LossInPlace)
EQUAL = (SubclassInBatch, WrittenByNumpy, WrittenByNumpyNowAndThen, WrittenByNumpyManyOutputs, AliasOfLoss)
LIVE = (WrittenThroughData, RowsAsManyAsTokens, ChosenByZeroAdvantage, AuxiliaryLoss, NoiseOnLogits, HookOnOutput)


@pytest.mark.parametrize("scenario", PRUNED, ids=lambda scenario: scenario.__name__)
def test_prunes(scenario):
    assert assert_same_training(scenario) == "".join(scenario.updates)


@pytest.mark.parametrize("scenario", EQUAL, ids=lambda scenario: scenario.__name__)
def test_trains_alike(scenario):
    assert_same_training(scenario)


@pytest.mark.parametrize("scenario", LIVE, ids=lambda scenario: scenario.__name__)
def test_keeps(scenario):
    assert "d" not in assert_same_training(scenario)


@pytest.mark.parametrize("compiled", [True, False])
def test_keeps_overflow_of_a_tensor_on_the_side(compiled):
    """0 * inf in the backward of a state that the model does not return: NaN in both arms."""

    def step(model: Any, batch: Batch) -> torch.Tensor:
        logits = model(batch["ids"])
        ratio = torch.exp(model.hidden.abs().sum(-1)[:, :-1] * 1e3)
        never = torch.zeros_like(batch["mask"]).bool()
        side = torch.where(never, ratio * batch["adv"][:, None], 0.0).sum()
        return policy_loss(token_logps(logits, batch["ids"]), batch) + side

    torch.manual_seed(0)
    model = KeptOnTheSide()
    step = gradprune.compile(step, zero="adv * mask") if compiled else step
    for seed in range(3):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoEffectWarning)
            step(model, make_batch(4, 6, dead=True, seed=seed)).backward()
        assert any(p.grad is not None and p.grad.isnan().any() for p in model.parameters())


class AnotherOutput(Scenario):
    """``(loss + beta * kl).backward()`` by the caller."""

    updates = MIXED

    def step(self, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        return policy_loss(logp, batch), logp.mean()

    def backward(self, output: Any, share: int) -> torch.Tensor:
        loss, extra = output
        ((loss + 0.05 * extra) / share).backward()
        return loss


class AnotherOutputOfMany(AnotherOutput):
    def model(self) -> torch.nn.Module:
        model = TinyModel()
        model.head = torch.nn.Linear(8, 200)
        return model


class AnotherOutputLater(AnotherOutput):
    """Both backwards, one after the other."""

    def backward(self, output: Any, share: int) -> torch.Tensor:
        loss, extra = output
        loss.backward(retain_graph=True)
        extra.backward()
        return loss


@pytest.mark.parametrize("scenario", [AnotherOutput, AnotherOutputOfMany, AnotherOutputLater])
def test_what_else_the_step_returned_has_its_gradient(scenario):
    assert_same_training(scenario)
