"""What the user's code sees and does: hooks, metrics, writes and models of its own are as in an unpruned run."""

from __future__ import annotations

import collections
import copy
import inspect
import warnings
from typing import Any

import pytest
import torch

import gradprune
from gradprune.errors import NoEffectWarning
from tests.adversarial.scenario import Bare, Batch, Scenario, assert_same_training, dead, policy_loss, token_logps, wide
from tests.adversarial.test_models import LONG
from tests.step.arms import TinyModel


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """A proof on disk would hide what proving does to the user's code."""
    monkeypatch.setenv("GRADPRUNE_CACHE", "")


class HookOnLogps(Scenario):
    """A hook that records a norm: for stand-ins, too, if it ran while the loss is proved."""

    updates = LONG

    def __init__(self) -> None:
        self.norms: list[Any] = []

    def record(self, gradient: torch.Tensor) -> None:
        self.norms.append(float(gradient.norm()))

    def step(self, model: Any, batch: Batch) -> Any:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        logp.register_hook(lambda gradient: self.record(gradient))
        return policy_loss(logp, batch)

    def log(self) -> Any:
        return [float(norm) for norm in self.norms]


class HookKeepsTensor(HookOnLogps):
    def record(self, gradient: torch.Tensor) -> None:
        self.norms.append(gradient.norm())


class RetainsGradient(HookOnLogps):
    """``logp.retain_grad()``, and a look at ``logp.grad`` after the backward."""

    def model(self) -> torch.nn.Module:
        return wide(TinyModel())

    def step(self, model: Any, batch: Batch) -> Any:
        self.logp = token_logps(model(batch["ids"]), batch["ids"])
        self.logp.retain_grad()
        return policy_loss(self.logp, batch)

    def backward(self, output: Any, share: int) -> torch.Tensor:
        (output / share).backward()
        self.record(self.logp.grad)
        return output


class WritesDataOfLogps(Scenario):
    updates = LONG

    def step(self, model: Any, batch: Batch) -> Any:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        logp.data.clamp_(min=-5.0)
        return policy_loss(logp, batch)


@pytest.mark.parametrize(
    "scenario",
    [HookOnLogps, HookKeepsTensor, RetainsGradient, WritesDataOfLogps],
    ids=lambda scenario: scenario.__name__,
)
def test_keeps_what_hooks_and_data_show(scenario):
    assert "d" not in assert_same_training(scenario)


class WritesDataNowAndThen(Scenario):
    """A dead run does not see a write through ``.data`` to what only the loss made."""

    updates = ("ddd", "ddd")
    make: Any = Bare

    def __init__(self) -> None:
        self.calls = 0

    def model(self) -> torch.nn.Module:
        return type(self).make()

    def step(self, model: Any, batch: Batch) -> Any:
        self.calls += 1
        logp = token_logps(model(batch["ids"]), batch["ids"])
        weight = batch["adv"][:, None] * batch["mask"]
        if self.calls == 5:
            weight.data.add_(0.5)
        return -(logp * weight).sum()


class WritesDataNowAndThenWide(WritesDataNowAndThen):
    make = staticmethod(lambda: wide(Bare()))


@pytest.mark.parametrize("scenario", [WritesDataNowAndThen, WritesDataNowAndThenWide], ids=lambda s: s.__name__)
def test_keeps_what_is_written_through_data_now_and_then(scenario):
    assert assert_same_training(scenario) == "ddd" + "dld"


class Defaults(Scenario):
    """Metrics in a defaultdict that is cleared: who asks for a key makes it."""

    updates = LONG

    def __init__(self) -> None:
        self.metrics: Any = collections.defaultdict(list)
        self.seen: list[Any] = []

    def before(self, model: Any, update: int, microbatch: int) -> Any:
        if microbatch == 0:
            self.metrics.clear()

    def step(self, model: Any, batch: Batch) -> Any:
        self.seen.append(sorted(self.metrics))
        loss = self.loss(model, batch)
        self.metrics[f"loss{len(self.seen) % 3}"].append(loss.item())
        return loss

    def log(self) -> Any:
        return self.seen


class HooksOnAccumulators(Scenario):
    """As data parallelism by hand does: hooks on the nodes that add to ``grad``."""

    updates = LONG

    def __init__(self) -> None:
        self.calls: list[str] = []

    def model(self) -> torch.nn.Module:
        model, self.nodes = TinyModel(), []
        for name, parameter in model.named_parameters():
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, name=name: self.calls.append(name))
            self.nodes.append(node)
        return model

    def log(self) -> Any:
        return sorted(self.calls)


class LooksAtSignature(Scenario):
    """As trainers do, to pass on what the model takes."""

    updates = LONG

    def logits(self, model: Any, batch: Batch) -> torch.Tensor:
        takes = inspect.signature(model.forward).parameters
        return model(**{name: value for name, value in batch.items() if name in takes})


@pytest.mark.parametrize("scenario", [Defaults, HooksOnAccumulators, LooksAtSignature], ids=lambda s: s.__name__)
def test_prunes_beside(scenario):
    assert assert_same_training(scenario) == "".join(LONG)


class CopiesModel(Scenario):
    """A reference is refreshed inside the step, in observed, dead and live runs: it is a model of its own."""

    updates = LONG

    def __init__(self) -> None:
        self.calls, self.gaps = 0, []

    def step(self, model: Any, batch: Batch) -> Any:
        if self.calls in (0, 3, 5, 10):
            self.reference = copy.deepcopy(model).requires_grad_(False)
        self.calls += 1
        with torch.no_grad():
            reference = token_logps(self.reference(batch["ids"]), batch["ids"])
        logp = token_logps(model(batch["ids"]), batch["ids"])
        self.gaps.append(float((logp.detach() - reference).mean()))
        return policy_loss(logp, batch)

    def log(self) -> Any:
        return self.gaps


class ReplacesForward(Scenario):
    """For good, in a run that began as a dead one."""

    updates = LONG

    def __init__(self) -> None:
        self.calls = 0

    def model(self) -> torch.nn.Module:
        return Bare()

    def step(self, model: Any, batch: Batch) -> Any:
        self.calls += 1
        if self.calls == 4:
            model.forward = lambda ids: 0.5 * Bare.forward(model, ids)
        return self.loss(model, batch)


@pytest.mark.parametrize("scenario", [CopiesModel, ReplacesForward], ids=lambda scenario: scenario.__name__)
def test_leaves_alone_what_the_step_does_to_its_model(scenario):
    assert assert_same_training(scenario).count("d") >= 7


def adding(extra: float) -> Any:
    class Adds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient, torch.full((), extra)

    return Adds


def test_keeps_another_function_than_the_proof_on_disk(monkeypatch, tmp_path):
    """The same source, and another number in its closure."""
    monkeypatch.setenv("GRADPRUNE_CACHE", str(tmp_path))
    outcomes = []
    for extra in (0.0, 0.01):
        function = adding(extra)

        def step(model: Any, batch: Batch, function: Any = function) -> torch.Tensor:
            logp = token_logps(model(batch["ids"]), batch["ids"])
            return function.apply(policy_loss(logp, batch), logp.sum())

        step = gradprune.compile(step, zero="adv * mask")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoEffectWarning)
            step(Bare(), dead(0)).backward()
        outcomes.append(bool(step.explain().decisions[0].outcome))
    assert outcomes == [False, True]
