"""Python state, random numbers and parameters that change between microbatches: each fresh scenario trains alike."""

from __future__ import annotations

import random
import types
from typing import Any

import numpy as np
import pytest
import torch

from tests.adversarial.scenario import Batch, Scenario, assert_same_training, kl_of, policy_loss, token_logps
from tests.step.arms import VOCABULARY, TinyModel

LONG = ("dddd", "dddd", "dldd")


def plain(logp: torch.Tensor, batch: Batch) -> torch.Tensor:
    return policy_loss(logp, batch)


def penalised(logp: torch.Tensor, batch: Batch) -> torch.Tensor:
    return policy_loss(logp, batch) + 0.1 * kl_of(logp, batch)


HELPERS = types.SimpleNamespace(loss=plain)


class WithKl(Scenario):
    """A coefficient that is raised in the middle of the second update."""

    updates = LONG

    def before(self, model: Any, update: int, microbatch: int) -> Any:
        self.change(0.05 if (update, microbatch) in ((1, 1), (1, 2)) else 0.0)

    def change(self, value: float) -> None:
        self.coefficient = value

    def step(self, model: Any, batch: Batch) -> Any:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        return policy_loss(logp, batch) + self.coefficient * kl_of(logp, batch)


class TensorInPlace(WithKl):
    def __init__(self) -> None:
        self.coefficient = torch.zeros(())

    def change(self, value: float) -> None:
        self.coefficient.fill_(value)


class FunctionReplaced(WithKl):
    def change(self, value: float) -> None:
        HELPERS.loss = penalised if value else plain

    def step(self, model: Any, batch: Batch) -> Any:
        return HELPERS.loss(token_logps(model(batch["ids"]), batch["ids"]), batch)


class Slots(WithKl):
    class Config:
        __slots__ = ("kl",)

    def __init__(self) -> None:
        self._hidden = self.Config()

    def change(self, value: float) -> None:
        self._hidden.kl = value

    def step(self, model: Any, batch: Batch) -> Any:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        return policy_loss(logp, batch) + self._hidden.kl * kl_of(logp, batch)


class ArrayAsWeights(WithKl):
    def change(self, value: float) -> None:
        self.weights = np.full(4, value, dtype=np.float32)

    def step(self, model: Any, batch: Batch) -> Any:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        return policy_loss(logp, batch) + (torch.as_tensor(self.weights) * logp.sum(-1)).sum()


class ArrayAsIndex(ArrayAsWeights):
    def step(self, model: Any, batch: Batch) -> Any:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        return policy_loss(logp, batch) + logp[self.weights > 0].sum()


class PythonRandom(Scenario):
    updates = LONG

    def draw(self) -> float:
        return random.random()

    def step(self, model: Any, batch: Batch) -> Any:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        return penalised(logp, batch) if self.draw() < 0.4 else plain(logp, batch)


class NumpyRandom(PythonRandom):
    updates = ("dddd", "dddd", "dddd")

    def draw(self) -> float:
        return float(np.random.rand())


class Unfrozen(Scenario):
    updates = ("d", "d", "d", "l", "d", "d")

    def before(self, model: Any, update: int, microbatch: int) -> Any:
        model.embed.requires_grad_(update not in (0, 1, 4))


class HeadReplaced(Scenario):
    updates = ("d", "d", "d", "d")

    def before(self, model: Any, update: int, microbatch: int) -> Any:
        if update == 2:
            torch.manual_seed(5)
            self.old, model.head = model.head, torch.nn.Linear(8, VOCABULARY)


class ParameterReplaced(HeadReplaced):
    def before(self, model: Any, update: int, microbatch: int) -> Any:
        if update == 2:
            self.old = model.head.weight
            model.head.weight = torch.nn.Parameter(2 * model.head.weight.detach())


class ModelReplaced(Scenario):
    """Each model has the id of the one before, if memory is given back at once."""

    updates = ("d", "d", "d", "d")

    def before(self, model: Any, update: int, microbatch: int) -> Any:
        torch.manual_seed(update)
        return TinyModel()


SCENARIOS = (
    *(WithKl, TensorInPlace, FunctionReplaced, Slots, ArrayAsWeights, ArrayAsIndex, PythonRandom, NumpyRandom),
    *(Unfrozen, HeadReplaced, ParameterReplaced, ModelReplaced),
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_trains_alike(scenario):
    assert_same_training(scenario)


@pytest.mark.parametrize("scenario", [WithKl, PythonRandom, Unfrozen, HeadReplaced], ids=lambda s: s.__name__)
def test_prunes(scenario):
    assert assert_same_training(scenario).count("d") >= 3
