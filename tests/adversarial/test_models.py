"""Models that do more in their backward than a cotangent asks of them, or whose graph depends on data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.adversarial.scenario import Batch, Scenario, assert_same_training, policy_loss, token_logps
from tests.step.arms import VOCABULARY, TinyModel

LONG = ("dddd", "dldd", "dddd")


class _Penalty(torch.autograd.Function):
    """The identity of `output`, whose backward sends a gradient of one into `penalty`, whatever the loss sends."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, torch.ones(())


class _Twice(torch.autograd.Function):
    """A Function like any other: nothing for nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class Injecting(TinyModel):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return _Penalty.apply(super().forward(ids), 0.01 * self.mix.weight.square().sum())


class InjectingInCheckpoint(TinyModel):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return _Penalty.apply(torch.tanh(self.mix(x)), 0.01 * self.mix.weight.square().sum())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.middle, self.embed(ids), use_reentrant=self.reentrant))


class Doubling(TinyModel):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return _Twice.apply(super().forward(ids))


class InjectsNowAndThen(TinyModel):
    """The penalty comes with long batches only: a Function that no trial of a short one has seen."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output = super().forward(ids)
        return _Penalty.apply(output, 0.01 * self.mix.weight.square().sum()) if ids[0, 0] % 2 else output


class Experts(torch.nn.Module):
    """Data decides which experts there is a gradient for; the others keep None."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 8)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))
        self.head = torch.nn.Linear(8, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        return self.head(self.experts[int(ids[0, 0]) % 6](hidden) + self.experts[int(ids[1, 0]) % 6](hidden))


class Of(Scenario):
    updates = LONG

    def __init__(self, model: Any) -> None:
        self._make = model

    def model(self) -> torch.nn.Module:
        return self._make()


INJECTING = {
    "injects": Injecting,
    "injects in a checkpoint": lambda: InjectingInCheckpoint(False),
    "injects in a reentrant checkpoint": lambda: InjectingInCheckpoint(True),
}


@pytest.mark.parametrize("name", INJECTING)
def test_keeps_gradient_that_the_model_injects(name):
    assert "d" not in assert_same_training(lambda: Of(INJECTING[name]))


def test_keeps_gradient_injected_now_and_then():
    assert_same_training(lambda: Of(InjectsNowAndThen))


def test_names_the_function_that_injects():
    import gradprune
    from gradprune.errors import NoEffectWarning
    from tests.step.arms import make_batch

    model = Injecting()
    step = gradprune.compile(Of(Injecting).step, zero="adv * mask")
    step(model, make_batch(4, 6, dead=True, seed=0)).backward()
    with pytest.warns(NoEffectWarning, match=r"is made inside the model.*_Penalty"):
        step(model, make_batch(4, 6, dead=True, seed=1)).backward()


def test_prunes_behind_a_function_that_injects_nothing():
    outcomes = assert_same_training(lambda: Of(Doubling))
    assert outcomes == "lddd" + "dldd" + "dddd"


def test_prunes_experts_that_data_picks():
    outcomes = assert_same_training(lambda: Of(Experts))
    assert outcomes == "dddd" + "dldd" + "dddd"


class WholeInCheckpoint(Scenario):
    """Recomputing the whole model updates the statistics of its batch norm a second time, in the backward."""

    updates = LONG

    def __init__(self, reentrant: bool) -> None:
        self.reentrant = reentrant

    def step(self, model: Any, batch: Batch) -> Any:
        ids = batch["ids"]
        if self.reentrant:
            anchor = torch.zeros((), requires_grad=True)
            logits = checkpoint(lambda ids, anchor: model(ids), ids, anchor, use_reentrant=True)
        else:
            logits = checkpoint(model, ids, use_reentrant=False)
        return policy_loss(token_logps(logits, ids), batch)


class AllInCheckpoint(WholeInCheckpoint):
    """Model and loss together."""

    def step(self, model: Any, batch: Batch) -> Any:
        def run(ids: torch.Tensor) -> torch.Tensor:
            return policy_loss(token_logps(model(ids), ids), batch)

        return checkpoint(run, batch["ids"], use_reentrant=False)


@pytest.mark.parametrize("scenario", [WholeInCheckpoint, AllInCheckpoint], ids=lambda scenario: scenario.__name__)
def test_keeps_buffers_that_recomputation_writes(scenario):
    assert_same_training(lambda: scenario(False))


def test_keeps_buffers_that_reentrant_recomputation_writes():
    assert_same_training(lambda: WholeInCheckpoint(True))
