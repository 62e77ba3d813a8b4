"""Train a tiny model with a hostile step, unpruned and pruned, and compare everything that training leaves behind."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

import gradprune
from gradprune.errors import NoEffectWarning
from tests.step.arms import Arm, TinyModel, assert_equal, make_batch

Batch = dict[str, torch.Tensor]


class Scenario:
    """A step with its state; one fresh object an arm. Override what the attack needs."""

    updates: Sequence[str] = ("dd", "dl", "dd")
    """One string an update, one letter a microbatch: d for dead, l for live."""
    options: ClassVar[dict[str, Any]] = {}

    def model(self) -> torch.nn.Module:
        return TinyModel()

    def batch(self, letter: str, seed: int) -> Batch:
        return make_batch(4, 6, dead=letter == "d", seed=seed)

    def before(self, model: Any, update: int, microbatch: int) -> Any:
        """Called before each microbatch; a module that it returns is trained from then on."""

    def step(self, model: Any, batch: Batch) -> Any:
        return self.loss(model, batch)

    def backward(self, output: Any, share: int) -> torch.Tensor:
        """The caller's part: from what the step returned to gradients. Returns the loss."""
        loss = output if isinstance(output, torch.Tensor) else output[0]
        (loss / share).backward()
        return loss

    def log(self) -> Any:
        """Python state that must agree too."""

    def logits(self, model: Any, batch: Batch) -> torch.Tensor:
        return model(batch["ids"])

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        return policy_loss(token_logps(self.logits(model, batch), batch["ids"]), batch)


class Bare(TinyModel):
    """Neither dropout nor batch norm in use."""

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(self.embed(ids)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(ids))


def wide(model: Any) -> Any:
    """`model` with so many outputs that the backward of a dead microbatch's loss is not run."""
    model.head = torch.nn.Linear(8, 300)
    return model


def dead(seed: int) -> Batch:
    return make_batch(4, 6, dead=True, seed=seed)


def token_logps(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def policy_loss(logp: torch.Tensor, batch: Batch) -> torch.Tensor:
    ratio, adv = torch.exp((logp - batch["old"]).clamp(-20, 20)), batch["adv"][:, None]
    term = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
    return (term * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)


def kl_of(logp: torch.Tensor, batch: Batch) -> torch.Tensor:
    gap = batch["old"] - logp
    return ((torch.exp(gap.clamp(-20, 20)) - gap - 1) * batch["mask"]).sum()


def train(scenario: Scenario, *, compiled: bool) -> Arm:
    """AdamW with weight decay, which moves on a gradient of zero and not on None."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = scenario.model()
    optimizer = adamw(model)
    arm = Arm(step=gradprune.compile(scenario.step, zero="adv * mask", **scenario.options) if compiled else None)
    for u, letters in enumerate(scenario.updates):
        optimizer.zero_grad()
        for m, letter in enumerate(letters):
            other = scenario.before(model, u, m)
            if isinstance(other, torch.nn.Module):
                model, optimizer = other, adamw(other)
            batch = scenario.batch(letter, 100 * u + m)
            loss = scenario.backward((arm.step if compiled else scenario.step)(model, batch), len(letters))
            arm.keep(f"{u}.{m}.loss", loss)
            for name, value in batch.items():
                if isinstance(value, torch.Tensor):
                    arm.keep(f"{u}.{m}.batch.{name}", value)
        for name, parameter in model.named_parameters():
            arm.keep(f"{u}.grad.{name}", parameter.grad)
        optimizer.step()
    keep_state(arm, model, optimizer)
    return arm


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def keep_state(arm: Arm, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, tensor in model.state_dict().items():
        arm.keep(name, tensor)
    for index, state in enumerate(optimizer.state.values()):
        for name, value in state.items():
            arm.keep(f"optimizer.{index}.{name}", torch.as_tensor(value))
    arm.keep("random", torch.get_rng_state())
    arm.keep("python random", torch.tensor(random.getstate()[1]))
    arm.keep("numpy random", torch.tensor(np.random.get_state()[1].astype(np.int64)))


def assert_same_training(make: Callable[[], Scenario]) -> str:
    """Both arms agree in every bit; returns the outcomes, one letter a microbatch."""
    unpruned, pruned = make(), make()
    expected = train(unpruned, compiled=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)
        arm = train(pruned, compiled=True)
    assert_equal(arm, expected)
    assert pruned.log() == unpruned.log()
    return "".join("l" if decision.outcome else "d" for decision in arm.step.explain().decisions)
