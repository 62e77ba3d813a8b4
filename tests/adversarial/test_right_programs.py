"""Programs that are right without pruning run with it too, whatever they ask of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import functional_call

from tests.adversarial.scenario import Bare, Batch, Scenario, assert_same_training, policy_loss, token_logps
from tests.adversarial.test_models import LONG, _Twice
from tests.step.arms import VOCABULARY, TinyModel


class ArgumentsOfCheckpoint(Scenario):
    """A model whose arguments have the names of those of torch's ``checkpoint``."""

    updates = LONG

    def model(self) -> torch.nn.Module:
        class Model(Bare):
            def forward(self, ids: torch.Tensor, debug: bool = False, function: Any = None) -> torch.Tensor:
                return super().forward(ids) * (0.5 if debug else 1.0)

        return Model()

    def logits(self, model: Any, batch: Batch) -> torch.Tensor:
        return model(batch["ids"], debug=True, function=None)


class KeepsLogps(Scenario):
    """The caller differentiates a tensor that the step kept, and did not return."""

    updates = LONG

    def step(self, model: Any, batch: Batch) -> Any:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        self.extra = logp.mean()
        return policy_loss(logp, batch)

    def backward(self, output: Any, share: int) -> torch.Tensor:
        ((output + 0.05 * self.extra) / share).backward()
        return output


class KeepsLoss(Scenario):
    """The caller takes the loss from where the step put it."""

    updates = LONG

    def step(self, model: Any, batch: Batch) -> Any:
        self.kept = self.loss(model, batch)
        return self.kept

    def backward(self, output: Any, share: int) -> torch.Tensor:
        (self.kept / share).backward()
        return self.kept


class _Output:
    __slots__ = ("loss",)


class LossInSlot(Scenario):
    """An output in which the loss cannot be replaced."""

    updates = LONG

    def step(self, model: Any, batch: Batch) -> Any:
        output = _Output()
        output.loss = self.loss(model, batch)
        return output

    def backward(self, output: Any, share: int) -> torch.Tensor:
        (output.loss / share).backward()
        return output.loss


class AsksForGradients(Scenario):
    """``torch.autograd.grad`` by the caller, while ``grad`` holds the sum so far."""

    updates = LONG

    def model(self) -> torch.nn.Module:
        self.made = TinyModel()
        return self.made

    def backward(self, output: Any, share: int) -> torch.Tensor:
        wanted = [p for name, p in self.made.named_parameters() if name != "unused"]
        for parameter, gradient in zip(wanted, torch.autograd.grad(output / share, wanted)):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return output


class DifferentiatesTwice(Scenario):
    updates = ("d", "l", "d")

    def model(self) -> torch.nn.Module:
        self.made = Bare()
        return self.made

    def backward(self, output: Any, share: int) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(output, self.made.mix.weight, create_graph=True)
        gradient.sum().backward(retain_graph=True)
        output.backward()
        return output


class PerSampleGradients(Scenario):
    """``torch.func.grad`` over the model, for a metric: it allows no hooks for saved tensors."""

    updates = LONG

    def __init__(self) -> None:
        self.seen: list[float] = []

    def model(self) -> torch.nn.Module:
        return Bare()

    def step(self, model: Any, batch: Batch) -> Any:
        frozen = {name: p.detach() for name, p in model.named_parameters()}
        found = torch.func.grad(lambda p: functional_call(model, p, (batch["ids"],)).square().mean())(frozen)
        self.seen.append(float(found["mix.weight"].norm()))
        return self.loss(model, batch)

    def log(self) -> Any:
        return self.seen


class HooksForbidden(Scenario):
    updates = LONG

    def step(self, model: Any, batch: Batch) -> Any:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            return self.loss(model, batch)


class LazyNorm(Scenario):
    """The first forward makes a part of the model."""

    updates = LONG

    def model(self) -> torch.nn.Module:
        model = TinyModel()
        model.norm = torch.nn.LazyBatchNorm1d()
        return model


class CompiledWithMore(Scenario):
    """A compiled model that returns a number without gradient, and its own input, the very tensor."""

    updates = LONG

    def __init__(self) -> None:
        self.seen: list[float] = []

    def model(self) -> torch.nn.Module:
        class Model(Bare):
            def forward(self, ids: torch.Tensor) -> Any:
                logits = super().forward(ids)
                return logits, logits.detach().mean(), ids

        model = Model()
        model.compile(backend="aot_eager", dynamic=True)
        return model

    def step(self, model: Any, batch: Batch) -> Any:
        logits, mean, ids = model(batch["ids"])
        assert ids is batch["ids"]
        self.seen.append(float(mean.numpy()))
        return policy_loss(token_logps(logits, ids), batch)

    def log(self) -> Any:
        return self.seen


twice = _Twice.apply


class BoundEarly(Scenario):
    """``apply`` of a Function, bound at import."""

    updates = LONG

    def step(self, model: Any, batch: Batch) -> Any:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        return policy_loss(logp, batch) + 0.01 * twice(logp).sum()


class NestedTensors(Scenario):
    updates = LONG

    def model(self) -> torch.nn.Module:
        return Bare()

    def logits(self, model: Any, batch: Batch) -> torch.Tensor:
        ids = torch.nested.nested_tensor(list(batch["ids"]), layout=torch.jagged)
        return torch.nested.to_padded_tensor(model(ids), 0.0)


class ComplexOutput(Scenario):
    updates = LONG

    def model(self) -> torch.nn.Module:
        class Model(Bare):
            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                logits = super().forward(ids)
                return torch.complex(logits, 2 * logits)

        return Model()

    def logits(self, model: Any, batch: Batch) -> torch.Tensor:
        return model(batch["ids"]).real


class Scripted(Scenario):
    updates = LONG

    def model(self) -> torch.nn.Module:
        parts = (torch.nn.Embedding(VOCABULARY, 8), torch.nn.Tanh(), torch.nn.Linear(8, VOCABULARY))
        return torch.jit.script(torch.nn.Sequential(*parts))


PRUNED = (
    *(ArgumentsOfCheckpoint, KeepsLogps, KeepsLoss, LossInSlot, AsksForGradients, DifferentiatesTwice),
    *(PerSampleGradients, HooksForbidden),
)


@pytest.mark.parametrize("scenario", PRUNED, ids=lambda scenario: scenario.__name__)
def test_prunes(scenario):
    assert assert_same_training(scenario) == "".join(scenario.updates)


@pytest.mark.parametrize("scenario", [LazyNorm, CompiledWithMore], ids=lambda scenario: scenario.__name__)
def test_prunes_after_the_first(scenario):
    assert assert_same_training(scenario) == "lddd" + "dldd" + "dddd"


@pytest.mark.parametrize("scenario", [BoundEarly, NestedTensors, ComplexOutput, Scripted], ids=lambda s: s.__name__)
def test_keeps(scenario):
    assert "d" not in assert_same_training(scenario)
