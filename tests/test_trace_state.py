"""A trace leaves nothing in the Python state of the program: neither for the next trace nor for a real run."""

from __future__ import annotations

import datetime
import functools
import queue
import types
from collections import deque
from typing import Any

import pytest
import torch

from gradprune import prove
from gradprune.facts import Certificate, Refusal
from gradprune.trace.state import State

LAST: dict[str, torch.Tensor] = {}
HISTORY: deque[torch.Tensor] = deque(maxlen=2)
CALLS = 0


class Tracker:
    seen: torch.Tensor | None = None

    def __init__(self) -> None:
        self.running = torch.zeros(())
        self.extra: dict[str, Any] = {"list": []}


class Slotted:
    __slots__ = ("kept",)


class Keeps(torch.autograd.Function):
    scale: torch.Tensor | None = None

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if Keeps.scale is None:
            Keeps.scale = torch.ones_like(grad)
        return grad * Keeps.scale


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(()))
        self.hidden: torch.Tensor | None = None

    def forward(self, x):
        self.hidden = self.layer(x)
        self.mean = self.hidden.detach().mean()
        return self.hidden[:, 0]


@functools.cache
def cached_ones(device: str) -> torch.Tensor:
    return torch.ones((), device=device)


def kept_in_a_global(x):
    if "x" in LAST:
        return LAST["x"]
    LAST["x"] = x.detach() * 2
    HISTORY.append(LAST["x"])
    return LAST["x"]


def counted(x):
    global CALLS
    CALLS += 1
    return x * CALLS


TRACKER, SLOTTED = Tracker(), Slotted()


def kept_in_objects(x):
    Tracker.seen = x.detach() if Tracker.seen is None else Tracker.seen + x.detach()
    TRACKER.running = TRACKER.running + x.detach().mean()
    TRACKER.extra["list"].append(x)
    SLOTTED.kept = getattr(SLOTTED, "kept", 0) + x.detach()
    return TRACKER.running


def kept_in_a_cell():
    total = None

    def loss(x, adv):
        nonlocal total
        total = x.detach() if total is None else total + x.detach()
        return branching((x * adv).sum() + 0 * total.sum(), x)

    return loss


def branching(value, x):
    """Two paths, so that the program is run twice in one proof."""
    return value * 2 if x.detach().sum() > 0 else value


LOSSES = {
    "global": lambda x, adv: branching((kept_in_a_global(x) * x * adv).sum(), x),
    "counter": lambda x, adv: branching((counted(x) * adv).sum(), x),
    "objects": lambda x, adv: branching((kept_in_objects(x) * x * adv).sum(), x),
    "cell": kept_in_a_cell(),
    "cache": lambda x, adv: branching((x * adv * cached_ones("cpu")).sum(), x),
    "backward": lambda x, adv: branching((Keeps.apply(x) * adv).sum(), x),
}


@pytest.mark.parametrize("name", LOSSES)
def test_runs_after_traces(name: str) -> None:
    loss = LOSSES[name]
    inputs = torch.rand(4), torch.zeros(4)
    for _ in range(2):
        verdict = prove(loss, inputs, zero="adv", wrt="x")
        assert isinstance(verdict, Certificate), str(verdict)
        assert verdict.paths == 2
    assert (LAST, list(HISTORY), CALLS, Tracker.seen) == ({}, [], 0, None)
    assert TRACKER.extra == {"list": []}
    assert not hasattr(SLOTTED, "kept")
    assert Keeps.scale is None
    assert cached_ones.cache_info().currsize == 0
    state = State([loss])
    x = inputs[0].clone().requires_grad_()
    for _ in range(2):
        loss(x, inputs[1]).backward()
    assert torch.equal(x.grad, torch.zeros(4))
    state.restore()  # for the other tests
    cached_ones.cache_clear()


def test_leaves_a_model_as_it_was() -> None:
    model = Model()
    mean = model.mean

    def step(model, batch):
        return (model(batch["x"]) * batch["adv"]).sum()

    assert prove(step, (model, {"x": torch.rand(4, 3), "adv": torch.rand(4)}), zero="adv", wrt="parameters")
    assert model.hidden is None
    assert model.mean is mean
    assert model._buffers["mean"] is mean


def test_refuses_a_tensor_of_another_trace() -> None:
    kept: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()  # Python does not show what it holds

    def loss(x, adv):
        before = x if kept.empty() else kept.get()
        kept.put(x.detach())
        return ((x + before) * adv).sum()

    inputs = torch.rand(4), torch.rand(4)
    assert prove(loss, inputs, zero="adv", wrt="x")
    verdict = prove(loss, inputs, zero="adv", wrt="x")
    assert isinstance(verdict, Refusal)
    (reason,) = verdict.reasons
    assert reason.kind == "untraceable"
    assert reason.where is not None
    assert "x + before" in reason.where.text
    assert prove(LOSSES["counter"], inputs, zero="adv", wrt="x")


class Strict(dict):
    """A mapping whose methods are its own."""

    def get(self, key):
        return self[key]

    def __setitem__(self, key, value):
        raise TypeError("registered only once")


def test_restores_only_what_changed() -> None:
    kept, added, strict = [1, 2], {"a": 0}, Strict(a=1)
    state = State([{"kept": kept, "added": added, "set": {1}, "strict": strict, "deque": HISTORY}])
    kept.append(3)
    added["b"] = added.pop("a")
    dict.update(strict, a=2, b=3)
    HISTORY.append(torch.ones(()))
    state.restore()
    assert kept == [1, 2]
    assert added == {"a": 0}
    assert strict == {"a": 1}
    assert not HISTORY


def test_leaves_what_is_read_only():
    """A timedelta makes its number of microseconds anew each time, and lets nobody set it."""
    holder = types.SimpleNamespace(limit=datetime.timedelta(milliseconds=200), calls=0)
    state = State([holder])
    holder.calls = 1
    state.restore()
    assert holder.calls == 0 and holder.limit == datetime.timedelta(milliseconds=200)
