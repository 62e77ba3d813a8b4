"""What the user's code does besides computing a loss happens once, also where a dead run turns out live."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.adversarial.scenario import Batch, Scenario, assert_same_training, kl_of, policy_loss, token_logps
from tests.step.arms import TinyModel

LONG = ("dddd", "dldd", "dddd")


class EveryThird(Scenario):
    """A term that comes at every third call, which no look at the state foretells; counters, logs, running means."""

    updates = LONG

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.mean = torch.zeros(())

    def step(self, model: Any, batch: Batch) -> Any:
        logp = token_logps(self.logits(model, batch), batch["ids"])
        self.seen.append(logp.detach().mean().item())
        self.mean.mul_(0.9).add_(logp.detach().mean(), alpha=0.1)
        batch["old"].add_(1e-3)
        loss = policy_loss(logp, batch)
        return loss + 0.1 * kl_of(logp, batch) if len(self.seen) % 3 == 0 else loss

    def log(self) -> Any:
        return self.seen, self.mean.item()


class DropsLayers(TinyModel):
    """Python's random numbers pick the layers."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for _ in range(4):
            if random.random() < 0.5:
                hidden = torch.tanh(self.mix(self.dropout(hidden)))
        return self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


class EveryThirdWithLayersDropped(EveryThird):
    def model(self) -> torch.nn.Module:
        return DropsLayers()


class Recomputes(TinyModel):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.mix(x)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.middle, self.embed(ids), use_reentrant=self.reentrant)
        return self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


class EveryThirdWithCheckpoint(EveryThird):
    def model(self) -> torch.nn.Module:
        return Recomputes(False)


class EveryThirdWithReentrantCheckpoint(EveryThird):
    def model(self) -> torch.nn.Module:
        return Recomputes(True)


class WithoutNorm(TinyModel):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.tanh(self.mix(self.embed(ids)))))


class EveryThirdCompiled(EveryThird):
    def model(self) -> torch.nn.Module:
        model = WithoutNorm()
        model.compile(backend="aot_eager", dynamic=True)
        return model


class EveryThirdInEvaluationMode(EveryThird):
    """The mode is another one again when the backward comes."""

    def step(self, model: Any, batch: Batch) -> Any:
        model.eval()
        loss = super().step(model, batch)
        model.train()
        return loss


class EveryThirdWithManyCalls(EveryThird):
    def step(self, model: Any, batch: Batch) -> Any:
        self.seen.append(1.0)
        logits = torch.cat([model(row[None]) for row in batch["ids"]])
        logp = token_logps(logits, batch["ids"])
        loss = policy_loss(logp, batch)
        return loss + 0.1 * kl_of(logp, batch) if len(self.seen) % 3 == 0 else loss


class EveryThirdInPlace(EveryThird):
    def step(self, model: Any, batch: Batch) -> Any:
        self.seen.append(1.0)
        logits = model(batch["ids"])
        logits.div_(0.7)
        logp = token_logps(logits, batch["ids"])
        loss = policy_loss(logp, batch)
        return loss + 0.1 * kl_of(logp, batch) if len(self.seen) % 3 == 0 else loss


class EveryThirdWithAutocast(EveryThird):
    def step(self, model: Any, batch: Batch) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().step(model, batch)


class EveryThirdWithUserHooks(EveryThird):
    """Hooks on the modules inside and on the parameters, which change gradients and count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def model(self) -> torch.nn.Module:
        model = TinyModel()
        model.mix.register_forward_hook(lambda module, args, output: 2 * output)
        model.head.register_full_backward_pre_hook(lambda module, gradients: tuple(0.5 * g for g in gradients))
        model.mix.weight.register_hook(self.count)
        return model

    def count(self, gradient: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return 2 * gradient

    def log(self) -> Any:
        return super().log(), self.calls


EVERY_THIRD = (
    *(EveryThird, EveryThirdWithLayersDropped, EveryThirdWithCheckpoint, EveryThirdWithReentrantCheckpoint),
    *(EveryThirdCompiled, EveryThirdInEvaluationMode, EveryThirdWithManyCalls, EveryThirdInPlace),
    *(EveryThirdWithAutocast, EveryThirdWithUserHooks),
)


@pytest.mark.parametrize("scenario", EVERY_THIRD, ids=lambda scenario: scenario.__name__)
def test_happen_once(scenario):
    outcomes = assert_same_training(scenario)
    assert "l" in outcomes[1:3], "a run turned out live"
    assert outcomes.count("d") >= 2


class StepsInside(Scenario):
    """The step trains a critic of its own, now and then: a backward and an optimizer inside the microbatch."""

    updates = LONG

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.critic = torch.nn.Linear(6, 1)
        self.adam = torch.optim.Adam(self.critic.parameters(), lr=0.1)
        self.calls = 0

    def step(self, model: Any, batch: Batch) -> Any:
        self.calls += 1
        logp = token_logps(model(batch["ids"]), batch["ids"])
        if self.calls % 2:
            self.adam.zero_grad()
            self.critic(batch["mask"]).mean().backward()
            self.adam.step()
        return policy_loss(logp, batch)

    def log(self) -> Any:
        return self.calls, self.critic.weight.tolist()


class KeepsLosses(Scenario):
    """Losses are summed up, and one backward serves an update."""

    updates = LONG

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []

    def backward(self, output: Any, share: int) -> torch.Tensor:
        self.held.append(output / share)
        if len(self.held) == share:
            sum(self.held).backward()
            self.held.clear()
        return output


class TwoBackwards(Scenario):
    updates = LONG

    def backward(self, output: Any, share: int) -> torch.Tensor:
        output.backward(retain_graph=True)
        (0.5 * output).backward()
        return output


@pytest.mark.parametrize("scenario", [StepsInside, KeepsLosses, TwoBackwards], ids=lambda scenario: scenario.__name__)
def test_trains_alike(scenario):
    assert_same_training(scenario)
