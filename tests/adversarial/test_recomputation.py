"""A dead run that turns out live computes its forward again: it finds the model as it was, and leaves it as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import functional_call

from tests.adversarial.scenario import Bare, Batch, Scenario, assert_same_training
from tests.adversarial.test_side_effects import EveryThird, KeepsLosses, Recomputes, TwoBackwards


class Again(EveryThird):
    """The third and the sixth microbatch turn out live."""

    updates = ("ddd", "dld")
    make: Any = Bare

    def model(self) -> torch.nn.Module:
        self.made = type(self).make()
        return self.made


class Picks(Bare):
    """A counter says which layer is used."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.other = 0, torch.nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.count += 1
        mix = self.mix if self.count % 2 else self.other
        return self.head(torch.tanh(mix(self.embed(ids))))


class Draws(Bare):
    """Dropout by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(ids)
        return self.head(hidden * (torch.rand(hidden.shape, generator=self.generator) > 0.3))


class ReplacesBuffer(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(ids)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean((0, 1))
        return self.head(hidden * (1 + self.mean))


class WritesAttribute(Bare):
    """A running mean that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(ids)
        self.mean.mul_(0.9).add_(0.1 * hidden.detach().mean((0, 1)))
        return self.head(hidden * (1 + self.mean))


class Appends(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(ids))
        return super().forward(ids)


class WritesParameter(Bare):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mix.weight.mul_(0.99)
        return super().forward(ids)


class Biased(Bare):
    def forward(self, ids: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids)) + bias))


class WritesArgument(Biased):
    def forward(self, ids: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        bias.mul_(2)
        return super().forward(ids, bias)


class Scaled(Bare):
    scale = 1.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.scale * self.hidden(ids))


class Cache:
    """What was seen so far, as the key-value caches of decoders: each forward extends it."""

    def __init__(self) -> None:
        self.states: list[torch.Tensor] = []


class Continues(Bare):
    def forward(self, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.states.append(self.embed(ids))
        sums = torch.cat(cache.states, 1).cumsum(1)
        return self.head(torch.tanh(self.mix(sums[:, -ids.shape[1] :])))


class Counts(Again):
    make = Picks


class DrawsItsOwn(Again):
    make = Draws


class BufferReplaced(Again):
    make = ReplacesBuffer


class AttributeWritten(Again):
    make = WritesAttribute


class ListExtended(Again):
    make = Appends

    def log(self) -> Any:
        return self.made.seen


class ParameterWritten(Again):
    make = WritesParameter


class OtherParameters(Again):
    """The parameters are others while the model runs."""

    def logits(self, model: Any, batch: Batch) -> torch.Tensor:
        return functional_call(model, {n: 0.5 * p for n, p in model.named_parameters()}, (batch["ids"],))


class Toggled(Again):
    """As an adapter that is switched on for the policy and off for what follows."""

    make = Scaled

    def logits(self, model: Any, batch: Batch) -> torch.Tensor:
        model.scale = 0.5
        logits = model(batch["ids"])
        model.scale = 1.0
        return logits


class WeightSetByHook(Again):
    """``spectral_norm`` sets ``mix.weight`` in a pre-hook, outside of what is computed again; two calls."""

    def model(self) -> torch.nn.Module:
        model = Bare()
        model.mix = torch.nn.utils.spectral_norm(model.mix)
        return model

    def logits(self, model: Any, batch: Batch) -> torch.Tensor:
        return model.head(torch.tanh(model.mix(model.hidden(batch["ids"]))))


class ArgumentWrittenAfterwards(Again):
    make = Biased

    def logits(self, model: Any, batch: Batch) -> torch.Tensor:
        bias = torch.full((8,), 0.5)
        logits = model(batch["ids"], bias)
        bias.fill_(-2.0)
        return logits


class ArgumentWrittenInside(Again):
    make = WritesArgument

    def logits(self, model: Any, batch: Batch) -> torch.Tensor:
        return model(batch["ids"], torch.full((8,), 0.5))


class Continued(Again):
    """A prompt, and its continuation with the cache."""

    make = Continues

    def logits(self, model: Any, batch: Batch) -> torch.Tensor:
        cache = Cache()
        return torch.cat([model(batch["ids"][:, :3], cache), model(batch["ids"][:, 3:], cache)], 1)


class FrozenBeforeBackward(Again):
    def backward(self, output: Any, share: int) -> torch.Tensor:
        self.made.embed.requires_grad_(False)
        (output / share).backward()
        self.made.embed.requires_grad_(True)
        return output


class BackwardTwice(Again):
    backward = TwoBackwards.backward


class BehindReentrantCheckpoint(Again):
    """One microbatch an update: what a segment hides needs its zeros in those that are observed again, too."""

    updates = ("d",) * 5
    make = staticmethod(lambda: Recomputes(True))


AGAIN = (
    *(Counts, DrawsItsOwn, BufferReplaced, AttributeWritten, ListExtended, ParameterWritten, OtherParameters),
    *(Toggled, WeightSetByHook, ArgumentWrittenAfterwards, ArgumentWrittenInside, Continued),
    *(FrozenBeforeBackward, BackwardTwice, BehindReentrantCheckpoint),
)


@pytest.mark.parametrize("scenario", AGAIN, ids=lambda scenario: scenario.__name__)
def test_finds_the_state_of_the_forward(scenario):
    outcomes = assert_same_training(scenario)
    assert "l" in outcomes[1:3], "a run turned out live"
    assert outcomes.count("d") >= 2


class Carries(Bare):
    """A state goes from one microbatch into the next."""

    state: Any = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.embed(ids))
        x = x if self.state is None else x + self.state
        self.state = torch.tanh(x).mean((0, 1))
        return self.head(torch.tanh(x))


class CarriesState(KeepsLosses):
    """The backward of the live microbatches runs through the dead one."""

    updates = ("ddd", "dll", "dll")

    def model(self) -> torch.nn.Module:
        return Carries()

    def before(self, model: Any, update: int, microbatch: int) -> Any:
        if microbatch == 0:
            model.state = None


def test_carries_a_state_from_a_dead_microbatch_into_a_live_one():
    assert_same_training(CarriesState)


class WithCounter(Scenario):
    """Nothing depends on it, but it has changed: the second microbatch is observed again."""

    updates = ("d",) * 5

    def model(self) -> torch.nn.Module:
        return Recomputes(True)

    def before(self, model: Any, update: int, microbatch: int) -> Any:
        self.counter = update


def test_prunes_behind_reentrant_checkpoints():
    assert assert_same_training(WithCounter) == "ldddd"
