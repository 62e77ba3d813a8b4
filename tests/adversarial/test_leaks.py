"""Nothing that the user let go is held, and a thread that shares the model is left alone."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

import gradprune
from tests.adversarial.scenario import Bare, Batch, dead, policy_loss, token_logps


def test_an_exception_lets_go_of_activations():
    """Out of memory, caught: a reference cycle would hold them until the collector comes."""
    alive = []

    def step(model: Any, batch: Batch) -> torch.Tensor:
        alive.append(weakref.ref(model(batch["ids"])))
        raise MemoryError

    step = gradprune.compile(step, zero="adv * mask")
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(MemoryError):
            step(Bare(), dead(0))
        assert alive[0]() is None
    finally:
        gc.enable()


def test_logits_that_the_user_let_go_are_freed(monkeypatch):
    """What the step's Python state held is looked at for the proof, and not kept."""
    monkeypatch.setenv("GRADPRUNE_CACHE", "")
    held: dict[str, torch.Tensor] = {}

    def step(model: Any, batch: Batch) -> torch.Tensor:
        held["logits"] = model(batch["ids"])
        return policy_loss(token_logps(held["logits"], batch["ids"]), batch)

    compiled = gradprune.compile(step, zero="adv * mask")
    compiled(Bare(), dead(0)).backward()
    logits = weakref.ref(held.pop("logits"))
    gc.collect()
    assert logits() is None


def test_prunes_beside_another_thread_in_the_same_model():
    """As a rollout worker that shares the policy: its calls are not the step's."""
    inside, leave = threading.Event(), threading.Event()
    workers: list[threading.Thread] = []

    class Shared(Bare):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if threading.current_thread() is workers[-1]:
                inside.set()
                leave.wait(20)
            else:
                workers[-1].start()
                inside.wait(20)
            return super().forward(ids)

    def work() -> None:
        with torch.no_grad():
            model(dead(0)["ids"])

    def step(model: Any, batch: Batch) -> torch.Tensor:
        logits = model(batch["ids"])
        leave.set()
        workers[-1].join()
        return policy_loss(token_logps(logits, batch["ids"]), batch)

    model, compiled = Shared(), gradprune.compile(step, zero="adv * mask")
    for seed in range(3):
        inside.clear(), leave.clear()
        workers.append(threading.Thread(target=work))
        compiled(model, dead(seed)).backward()
    assert [bool(decision.outcome) for decision in compiled.explain().decisions] == [False] * 3
